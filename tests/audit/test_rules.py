"""The rules: real names get theirs, planted ones get none, and there is no wildcard."""

from __future__ import annotations

import ast
import ctypes
import mmap
import re
import tomllib
from pathlib import Path

import pytest
from audit_support import PROOFS, lines

from sgl_det.audit.names import canonical
from sgl_det.audit.report import rule_line
from sgl_det.audit.rules import DATA, Kind, load

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
KNOWN, UNKNOWN = lines("known.tsv"), lines("unknown.tsv")


@pytest.mark.parametrize("rule, name", KNOWN, ids=[f"{r}-{i}" for i, (r, _) in enumerate(KNOWN)])
def test_known_kernel(rules, rule, name):
    verdict = rules.judge(name, PROOFS)
    assert (verdict.rule, verdict.kind is Kind.UNKNOWN) == (rule, False)
    assert verdict.why and verdict.source
    assert len(rules.of(canonical(name))) == 1


@pytest.mark.parametrize("why, name", UNKNOWN, ids=[n[:60] for _, n in UNKNOWN])
def test_planted_kernel(rules, why, name):
    verdict = rules.judge(name, PROOFS)
    assert verdict.kind is Kind.UNKNOWN and not verdict.rule
    assert why in verdict.why


def test_every_rule_has_an_example(rules):
    assert {rule for rule, _ in KNOWN} == {rule.id for rule in rules.rules}


@pytest.mark.parametrize("word", ["splitK", "split_k", "streamK", "v2"])
def test_word_planted_in_a_known_name(rules, word):
    """Before any underscore, before the template arguments, and at both ends."""
    for _, name in KNOWN:
        places = {0, len(name), *(m.start() for m in re.finditer("[_<(]", name[:120]))}
        for at in places:
            planted = f"{name[:at]}_{word}{name[at:]}"
            stays = canonical(planted) == canonical(name)  # in the parameters of a C++ kernel
            assert stays or rules.judge(planted, PROOFS).kind is Kind.UNKNOWN, planted


def test_fa3_flags(rules):
    """Split, local, append and the value of the KV tile are not free."""
    name = next(n for r, n in KNOWN if r == "fa3.one_pass" and "cute::C<64>, cute::C<128>" in n)
    flags = re.search(r"Sm90, ((?:(?:true|false), ){13})", name)[1].split(", ")[:-1]
    free = {0, 2}  # causal, softcap
    for i, flag in enumerate(flags):
        changed = [*flags[:i], {"true": "false", "false": "true"}[flag], *flags[i + 1 :]]
        planted = name.replace(", ".join(flags), ", ".join(changed))
        known = rules.judge(planted, PROOFS).kind is not Kind.UNKNOWN
        assert known == (i in free), (i, planted)
    assert rules.judge(name.replace("<128>", "<176>"), PROOFS).kind is Kind.UNKNOWN


def test_proven_needs_its_proof(rules):
    names = {rule.id: rule.proof for rule in rules.rules if rule.kind is Kind.PROVEN}
    assert set(names.values()) == {"linear", "rows"}
    for rule, name in KNOWN:
        if rule in names:
            verdict = rules.judge(name, {p: 1 for p in PROOFS if p != names[rule]})
            assert verdict.kind is Kind.UNKNOWN and names[rule] in verdict.why


def test_no_wildcards(rules):
    """Literal text, choices among literal texts, and decimal numbers: nothing else."""
    for rule in rules.rules:
        left = re.sub(r"\\d\+|\\.|\(\?:|\)|\|", "", rule.expression.pattern)
        assert not re.search(r"[.*+?\[\]{}^$(]", left), rule.id


def test_refusals_come_before_rules(tmp_path):
    line = "rule = [{ id='a', class='fixed order', why='w', source='s', names=['x_splitK_y'] }]\n"
    (tmp_path / "a.toml").write_text(line)
    assert load(tmp_path).judge("x_splitK_y").kind is Kind.FIXED
    (tmp_path / "refused.toml").write_text((DATA / "refused.toml").read_text())
    assert load(tmp_path).judge("x_splitK_y").kind is Kind.UNKNOWN


def test_no_rule_holds_a_refused_word(rules):
    for rule in rules.rules:
        for name in rule.names:
            assert not [w for w in rules.refused if w in name.lower()], name


@pytest.mark.parametrize("name", [n for _, n in UNKNOWN if "split" not in n.lower()][:8])
def test_proposed_line_accepts_the_kernel(tmp_path, name):
    """What the report prints, completed, is all that has to be added."""
    line = rule_line(canonical(name)).replace("class = ''", "class = 'pointwise'")
    empty = (DATA / "added.toml").read_text()
    (tmp_path / "added.toml").write_text(empty.replace("rule = [\n", f"rule = [\n{line}\n"))
    with pytest.raises(ValueError, match="added.toml: rule '' leaves"):
        load(tmp_path)
    for key in ("id", "why", "source"):
        line = line.replace(f"{key} = ''", f"{key} = 'x'")
    (tmp_path / "added.toml").write_text(empty.replace("rule = [\n", f"rule = [\n{line}\n"))
    assert load(tmp_path).judge(name).rule == "added.x"


GOOD = {"id": "a", "class": "pointwise", "why": "w", "source": "s", "names": "['k']"}
BAD = {
    "no-class": ({"class": "''"}, "empty"),
    "no-names": ({"names": "[]"}, "empty"),
    "unknown-class": ({"class": "'sure'"}, "sure"),
    "class-unknown": ({"class": "'unknown'"}, "proof"),
    "proven-without-proof": ({"class": "'proven invariant'"}, "proof"),
    "proof-without-proven": ({"proof": "'linear'"}, "proof"),
    "field-without-values": ({"names": "['f<${type}>']"}, "'type'"),
    "missing-key": ({"why": None}, "why"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_rule(tmp_path, case):
    changes, word = BAD[case]
    entry = {k: v if v.startswith("[") else f"'{v}'" for k, v in GOOD.items()} | changes
    text = ", ".join(f"{k} = {v}" for k, v in entry.items() if v is not None)
    (tmp_path / "bad.toml").write_text(f"rule = [{{ {text} }}]\n")
    with pytest.raises(ValueError, match=r"^bad\.toml: ") as error:
        load(tmp_path)
    assert word in str(error.value)


def test_every_triton_kernel_of_ours_has_a_rule(rules):
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                if any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                    assert rules.judge(node.name).rule, f"{path.name}: {node.name}"


def test_names_of_pytorch_exist(rules):
    """Each name of a rule on PyTorch, and each value of its fields, is one that PyTorch has."""
    torch = pytest.importorskip("torch")
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not library.is_file():
        pytest.skip("this PyTorch has no CUDA library")
    text = "\n".join(sorted({canonical(name) for name in _symbols(library)}))
    for path in DATA.glob("pytorch_*.toml"):
        data = tomllib.loads(path.read_text())
        from sgl_det.audit.rules import _expression

        names = [canonical(name) for rule in data["rule"] for name in rule["names"]]
        for name in names:
            pattern = _expression(name, data["fields"])
            assert re.search(f"^{pattern}$", text, re.MULTILINE), f"{path.name}: {name}"
        for values in data["fields"].values():
            for value in values:
                assert re.search(_expression(value, data["fields"]), text), value


def _symbols(library: Path):
    """Demangled names of the kernels in a library."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    demangle.restype = ctypes.c_void_p
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    with library.open("rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            pattern = rb"_ZN(?:2at6native|12_GLOBAL__N_|\d+_GLOBAL__N_|14at_cuda_detail)\w+"
            found = {m.group() for m in re.finditer(pattern, memory)}
    for name in found:
        pointer = demangle(name, None, None, None)
        if pointer:
            yield ctypes.string_at(pointer).decode()
            free(pointer)
