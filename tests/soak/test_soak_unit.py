"""Parts of the soak by themselves: plans, comparisons, records, and the verb's errors."""

from __future__ import annotations

import argparse
import json
import random

import pytest

from sgl_det.probe.client import Facts
from sgl_det.soak import answers, oracle, verb
from sgl_det.soak.answers import cut_difference, difference, native_parts
from sgl_det.soak.draw import Draw
from sgl_det.soak.kinds import KINDS, plan, usable
from sgl_det.soak.send import Entry, ways


def facts(**given) -> Facts:
    usual = {"key": "k", "claims": None, "not_claimed": {}, "vocab_size": 300, "max_input": 992}
    usual |= {"max_total": 4000, "max_running": 64, "chunk": 256, "splits": (64,), "radix": True}
    usual |= {"grammar": True, "page_size": 1, "device": "cpu", "model": "m", "recorded": {}}
    return Facts(**usual | given)


# A small server, and one that holds a large model on a GPU.
SERVERS = {
    "small": facts(max_total=600, max_input=592, chunk=64),
    "cpu": facts(),
    "gpu": facts(
        device="cuda", vocab_size=151936, max_input=40952, max_total=700_000, chunk=8192,
        splits=(512, 4096), max_running=1024,
    ),
}  # fmt: skip


@pytest.mark.parametrize("server", SERVERS.values(), ids=list(SERVERS))
@pytest.mark.parametrize("n", [11, 66, 300])
def test_a_plan_follows_its_seed_and_fits_the_server(server, n):
    items = plan(server, 3, n, list(KINDS))
    assert items == plan(server, 3, n, list(KINDS)) != plan(server, 4, n, list(KINDS))
    assert {i.kind for i in items} == set(KINDS) and n <= len(items) <= n + 6 * 4
    assert len({i.name for i in items}) == len(items)
    turns = [i for i in items if i.kind == "multi_turn"]
    longest = {}
    for i in turns:  # a turn holds those before it
        longest[i.name] = i.footprint + longest.get(i.after, 0)
    for i in items:
        assert longest.get(i.name, i.footprint) <= server.max_input, i.name
        assert 3 * i.footprint <= 1.1 * server.max_total, i.name
        assert i.new_tokens >= 1 and ways(i)


def test_long_prompts_take_several_chunks():
    items = plan(SERVERS["gpu"], 0, 40, ["long"])
    assert max(i.tokens for i in items) > 2 * 8192


def test_kinds_follow_the_claims():
    assert usable(facts()) == list(KINDS)
    assert "structured" not in usable(facts(grammar=False))
    assert usable(facts(claims=frozenset({"batch_size", "sampled"}))) == ["greedy", "seeded"]


def reply(**meta):
    rows = [[-0.5, 7, None], [-0.25, 8, None]]
    usual = {"finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3}
    usual |= {"output_token_logprobs": rows, "output_top_logprobs": [[r] for r in rows]}
    usual |= {"input_token_logprobs": [[None, 4, None], [-3.0, 5, None]]}
    return {"text": "ab", "output_ids": [7, 8], "meta_info": usual | meta}


EXPECTED = native_parts(reply())


def test_equal_answers_have_no_difference_and_survive_json():
    assert difference(EXPECTED, native_parts(reply())) is None
    assert difference(json.loads(json.dumps(EXPECTED)), EXPECTED) is None


@pytest.mark.parametrize(
    "part, index, changed",
    [
        ("logprob", 1, {"output_token_logprobs": [[-0.5, 7, None], [-0.25 - 2**-54, 8, None]]}),
        ("logprob", 0, {"output_token_logprobs": [[-0.0, 7, None], [-0.25, 8, None]]}),
        ("top_logprobs", 1, {"output_top_logprobs": [[[-0.5, 7, None]], [[-0.25, 9, None]]]}),
        ("prompt_logprob", 1, {"input_token_logprobs": [[None, 4, None], [-3.5, 5, None]]}),
        ("finish", 10, {"finish_reason": {"type": "stop", "matched": 8}}),
        ("top", 0, {"output_top_logprobs": None}),
        ("prompt_length", 0, {"prompt_tokens": 4}),
    ],
    ids=["last-bit", "sign-of-zero", "top", "prompt", "finish", "missing", "prompt-length"],
)  # fmt: skip
def test_every_part_is_compared(part, index, changed):
    zero = native_parts(reply(output_token_logprobs=[[0.0, 7, None], [-0.25, 8, None]]))
    expected = zero if changed.get("output_token_logprobs", [[1]])[0][0] == 0 else EXPECTED
    place = difference(expected, native_parts(reply(**changed)))
    assert (place.part, place.index) == (part, index), place
    json.dumps(place.to_json())


def test_a_text_and_a_token_differ():
    assert difference(EXPECTED, EXPECTED | {"text": "ac"}).part == "text"
    assert difference(EXPECTED, EXPECTED | {"tokens": [7, 9]}).part == "token"
    assert difference(EXPECTED, EXPECTED | {"text": "ac"}, answers.QUIET[:1]) is None


def test_the_beginning_of_an_answer_is_compared():
    cut = {"finish": '{"type": "abort"}', "prompt_length": 3}
    first = {"tokens": [7], "logprobs": EXPECTED["logprobs"][:1], "top": EXPECTED["top"][:1]}
    assert cut_difference(EXPECTED, cut | first) is None
    assert cut_difference(EXPECTED, cut) is None
    assert cut_difference(EXPECTED, cut | first | {"tokens": [6]}).part == "token"
    assert cut_difference(EXPECTED, cut | {"tokens": [7, 8, 9]}).part == "length"
    # Aborted before it began: SGLang generates from another prompt.
    assert cut_difference(EXPECTED, cut | {"tokens": [6], "prompt_length": 1}) is None


def call(*argv) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(argv))


URL = ("--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    "argv, words",
    [
        (("--url", "localhost:1"), "http://"),
        (URL, "cannot reach"),
        ((*URL, "--json", "/no/such/x.json"), "folder does not exist"),
        ((*URL, "--minutes", "0"), "--minutes is 0.0; give a number above 0"),
        ((*URL, "--replay", "/no/such/x.json"), "cannot read"),
    ],
    ids=["no-scheme", "no-server", "folder", "minutes", "replay"],
)
def test_usage_errors_are_one_sentence_and_exit_2(argv, words, capsys):
    assert call(*argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"key": "k"}')
    with pytest.raises(oracle.ProbeError, match="is not a file for --oracle-file"):
        oracle.load(path, "k", facts())


def test_acts_are_random_and_well_formed():
    items = plan(facts(), 0, 66, list(KINDS))
    book = {i.name: Entry(i, {"tokens": [1] * i.new_tokens}) for i in items}
    draw = Draw(book, random.Random(0), 0.1)
    acts = [draw.one() for _ in range(3000)]
    flat = [act for several in acts for act in several]
    assert {book[a.names[0]].item.kind for a in flat} == set(KINDS)
    assert {a.way for a in flat} == {w for i in items for w in ways(i)}
    for several in acts:
        turns = [book[a.names[0]].item.after for a in several]
        assert turns[1:] == [a.names[0] for a in several][:-1]  # each follows the one before
    rids = [a.options["rid"] for a in flat if "rid" in a.options]
    # SGLang aborts by the beginning of an id.
    assert len({*rids}) == len(rids) > 100 and len({len(r) for r in rids}) == 1


def test_pressure_is_as_large_as_asked_and_cuts_nothing():
    items = plan(facts(), 0, 66, list(KINDS))
    draw = Draw({i.name: Entry(i, {}) for i in items}, random.Random(0), 0.1)
    sizes = {i.name: i.footprint for i in items}
    found = [act for (act,) in draw.pressing(500, 9000)]
    assert sum(sizes[a.names[0]] for a in found) >= 9000
    assert {a.way for a in found} <= {"plain", "stream", "quiet"}
    assert len(draw.pressing(5, 9000)) == 5 and draw.pressing(0, 9000) == draw.pressing(5, -1) == []


def test_a_difference_is_told_of_what_was_compared():
    """A route that tells no token ids differs in its log-probabilities, and not in ids."""
    expected = {"tokens": [7, 8], "logprobs": ["0x1p-1", "0x1p-2"], "text": "ab"}
    found = {"logprobs": ["0x1p-1", "0x1p-3"], "text": "ab"}
    place = difference(expected, found, ("text", "logprobs"))
    assert (place.part, place.index) == ("logprob", 1)
    assert difference(expected, {"text": "ab"}, ("text", "logprobs")).words == "logprobs is missing"
