"""kernels.json and its README section, from handwritten lines; benchmarks that are resumed."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from sgl_det import readme

MACHINE = {"gpu": "A GPU", "torch": "2.0", "triton": "3.0", "cublas": "13.0", "sources": "abc"}
HEADER = {"machine": MACHINE, "bits": "the order on one kind of data"}


def _script(name: str):
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels_json, case_file = _script("kernels_json"), _script("case_file")


def case(arms: dict, *, m: int = 1, op: str = "qkv", **more) -> dict:
    about = {"op": op, "n": 64, "k": 32, "m": m, "dtype": "bf16", "tp": 1}
    return about | {"arms": arms, "spread": 0.01, "errors": {}} | more


def written(path: Path, *cases: dict, header: dict = HEADER) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *cases)))
    return path


def made(tmp_path: Path, *cases: dict) -> dict:
    return kernels_json.document(*kernels_json.read([written(tmp_path / "a.jsonl", *cases)]))


def test_rows_of_an_earlier_document_stay_where_nothing_replaces_them(tmp_path):
    arms = {"default": [8, 0], "a": [4, 0]}
    before = json.loads(json.dumps(made(tmp_path, case(arms, m=1), case(arms, m=2))))
    file = written(
        tmp_path / "b.jsonl",
        case({"default": [8, 0], "a": [2, 0]}, m=2),
        case({"fused": [2, 0], "sgl_det": [4, 0]}, op="rms_norm"),
        header={"machine": MACHINE | {"torch": "2.1"}, "bits": "rows"},
    )
    after = kernels_json.document(*kernels_json.read([file]), before)
    assert [(r["op"], r["m"], r["us"]) for r in after["rows"]] == [
        ("qkv", 1, 4),
        ("qkv", 2, 2),
        ("rms_norm", 1, 4),
    ]
    keys = [r["key"] for r in after["rows"]]
    assert keys[0] != keys[1] == keys[2] and set(after["versions"]) == set(keys)
    assert after["summary"]["linear"]["bits"] == ["rows", HEADER["bits"]]


@pytest.mark.parametrize(
    "arms, kernel, ratio",
    [
        ({"default": [8, 0], "a": [10, 0], "b": [4, 0]}, "b", 2.0),
        ({"default": [8, 5], "a": [10, 0], "b": [4, 1]}, "a", 0.8),
        ({"default": [8, 0], "a": [10, 0]}, "a", 0.8),
        ({"default": [8, 0], "a": [4, 1]}, "default", 1.0),
        ({"default": [8, 5], "a": [4, 1]}, None, None),
        ({"a": [4, 0]}, "a", None),
        ({"fused": [2, 0], "sgl_det": [4, 0]}, "sgl_det", 0.5),
    ],
    ids=[
        "fastest",
        "fastest-is-not-bitwise",
        "default-is-no-candidate",
        "nothing-but-default",
        "nothing-is-bitwise",
        "no-default",
        "norm",
    ],
)
def test_row_names_the_fastest_bitwise_kernel(tmp_path, arms, kernel, ratio):
    (row,) = made(tmp_path, case(arms))["rows"]
    assert (row["kernel"], row["ratio"], row["bitwise"]) == (kernel, ratio, kernel is not None)
    assert (row["us"] is None) == (kernel is None)


def test_the_time_of_auto_stands_beside_its_row(tmp_path):
    arms = {"upstream": [8.0, None], "auto": [4.0, None], "served": [10.0, 0]}
    (row,) = made(tmp_path, case(arms, op="flashinfer prefill"))["rows"]
    assert (row["auto_us"], row["ratio"], row["kernel"]) == (4.0, 0.8, "served")


def test_geometric_mean():
    assert kernels_json.geomean([0.5, 2.0, 8.0]) == 2.0
    assert kernels_json.geomean([]) is None


def test_summary_counts_what_has_no_ratio_and_does_not_average_it(tmp_path):
    cases = (
        case({"default": [8, 0], "a": [4, 0]}, m=1),
        case({"default": [9, 0], "a": [10, 0]}, m=64),
        case({"default": [7, 0], "a": [10, 0]}, m=65),
        case({"default": [8, 1], "a": [4, 1]}, m=2),
        case({"fused": [8, 0], "sgl_det": [8, 0]}, m=1, op="qk_norm"),
    )
    found = made(tmp_path, *cases)["summary"]
    linear, norms = found["linear"], found["norms"]
    assert (linear["cases"], linear["bitwise"], linear["measured"]) == (4, 3, 3)
    assert linear["geomean"] == round(math.cbrt(2 * 0.9 * 0.7), 4)
    assert linear["geomean_m_to_64"] == round(math.sqrt(2 * 0.9), 4)
    assert linear["under"] == {"0.95": 2, "0.90": 1, "0.80": 1}
    assert [r["ratio"] for r in linear["worst"]] == [0.7, 0.9, 2.0]
    (group,) = linear["groups"]
    assert (group["dtype"], group["tp"], group["m"]["65 to 512"]) == ("bf16", 1, 0.7)
    assert group["m"]["above 512"] is None
    assert (norms["cases"], norms["geomean"], norms["groups"][0]["op"]) == (1, 1.0, "qk_norm")


def test_the_last_file_says_what_a_case_took(tmp_path):
    other = {"machine": MACHINE | {"triton": "3.1"}}
    old = written(tmp_path / "old", case({"default": [8, 0], "a": [4, 0]}))
    new = written(tmp_path / "new", case({"default": [8, 0], "a": [2, 0]}), header=other)
    cases, headers = kernels_json.read([old, new])
    (row,) = kernels_json.document(cases, headers)["rows"]
    assert (row["ratio"], len(headers)) == (4.0, 2)
    assert headers[row["key"]]["machine"]["triton"] == "3.1"


@pytest.mark.parametrize(
    "header, reason",
    [(case({}), "begins with a case"), ({"machine": {"gpu": "B"}}, "2 GPUs")],
    ids=["no-machine", "two-gpus"],
)
def test_files_without_one_machine_are_refused(tmp_path, header, reason):
    paths = [written(tmp_path / "a"), written(tmp_path / "b", header=header)]
    with pytest.raises(ValueError, match=reason):
        kernels_json.read(paths)


def test_the_table_tells_what_is_known_of_slow_cases(tmp_path, capsys):
    cases = (
        case({"default": [7, 3], "a": [10, 0], "b": [8, 9]}, m=4, spread=0.2),
        case({"default": [8, 1], "a": [4, 1]}, m=2),
        case({"default": [8, 0], "a": [8, 0]}, m=1),
    )
    out = tmp_path / "kernels.json"
    path = written(tmp_path / "a.jsonl", *cases)
    assert kernels_json.main([str(path), "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == made(tmp_path, *cases)
    nothing, slow = capsys.readouterr().out.splitlines()[1:3]
    assert "NOTHING IS BITWISE" in nothing
    for part in ("0.700", "default has other bits", "b takes 8.00 us", "differ by 20%"):
        assert part in slow


def test_readme_section(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.kernels_table("a-gpu") == "Not measured yet."
    document = made(
        tmp_path,
        case({"default": [8, 0], "a": [4, 0]}),
        case({"default": [7, 0], "a": [10, 0]}, m=600),
        case({"default": [7, 1], "a": [10, 1]}, m=700),
    )
    folder = tmp_path / "benchmarks" / "results" / "a-gpu"
    folder.mkdir(parents=True)
    (folder / "kernels.json").write_text(kernels_json.text(document))
    section = readme.kernels_table("a-gpu")
    assert "| bf16 | 1 | 3 | 2.000 | - | 0.700 | 1.183 | 1 (50%) |" in section
    assert "**2 of 3** (the order on one kind of data)" in section
    assert "`qkv` 64x32 bf16 TP1 M=600 0.700; " in section
    assert "Norms: not measured yet." in section and document["rows"][0]["key"] in section


FIELDS = ("n", "m")


def test_a_benchmark_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "out.jsonl"
    case_file.CaseFile(path, HEADER, FIELDS).add({"n": 1, "m": 1, "us": 2.0})
    with path.open("a") as file:
        file.write('{"n": 1, "m": 2, "u')  # cut off by a time limit
    again = case_file.CaseFile(path, HEADER, FIELDS)
    assert {"n": 1, "m": 1} in again and {"n": 1, "m": 2} not in again
    again.add({"n": 1, "m": 2, "us": 3.0})
    assert {"n": 1, "m": 2} in again
    header, *cases = map(json.loads, path.read_text().splitlines())
    assert (header, [c["us"] for c in cases]) == (HEADER, [2.0, 3.0])


def test_a_benchmark_does_not_go_on_elsewhere(tmp_path):
    path = written(tmp_path / "out.jsonl", case({}))
    before = path.read_text()
    with pytest.raises(ValueError, match="another file"):
        case_file.CaseFile(path, {"machine": MACHINE | {"torch": "2.1"}}, FIELDS)
    assert path.read_text() == before


def test_of_samplers_what_serves_counts():
    arms = {"upstream": [40.0, None], "served": [20.0, 0], "upstream eager": [80.0, None]}
    case = {"op": "sample top_k 50", "n": 151936, "k": 0, "m": 16, "dtype": "fp32", "tp": 1}
    case |= {"arms": arms | {"served eager": [10.0, 0]}, "key": "k"}
    found = kernels_json.row(case)
    assert kernels_json.kind(case) == "samplers"
    assert (found["kernel"], found["us"], found["ratio"]) == ("served", 20.0, 2.0)
