"""e2e.json: the rows of a machine, made from what was measured and merged over sittings.

``{"gpu": ..., "rows": [{backend, workload, arm, metric, value, min, max, ratio, verdict, key}]}``
A metric is better where it is less (seconds, milliseconds), but for what an arm has beside
(`BESIDE`, `ALONE`). ratio is our value over normal's, paired by round, on the sgl_det rows alone,
and only where the verdict of that arm is bitwise. key is the numerics key of the sgl_det arm in
the same run, on the rows of all its arms. Later rows are newer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_det.bench import stats
from sgl_det.bench.arms import NORMAL, OURS
from sgl_det.bench.verdict import BITWISE, NOT_TESTED
from sgl_det.bench.workloads import CACHED, Workload

NAME = "e2e.json"
BESIDE, ALONE = "servers side by side", "server alone"  # workloads of start-up, memory, capacity
_ID = ("backend", "workload", "arm", "metric", "key")
_ARM = ("backend", "arm", "key")


def rows(
    measured: Sequence[Mapping[str, Any]],
    workloads: Mapping[str, Workload],
    head: Mapping[str, str],
    verdicts: Mapping[str, str],
    notes: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One row a workload, arm and metric, of the rounds that count.

    head: backend, model and key. notes: what to say of an arm on its rows of shared prefixes, where
    its prefix cache is off. No ratio where the verdict is not bitwise, or where prompts that should
    have come from the prefix cache did not.
    """
    found = []
    for name, w in workloads.items():
        mine = [m for m in measured if m["workload"] == name and m["counted"]]
        arms = list(dict.fromkeys(m["arm"] for m in mine))
        cold = [a for a in arms if w.kind == CACHED and _least_cached(mine, a) < 0.9 * w.prompt]
        cold_pair = bool({NORMAL, OURS} & set(cold))
        for metric in dict.fromkeys(k for m in mine for k in m["metrics"]):
            by = {a: _by_round(mine, a, metric) for a in arms}
            for arm in arms:
                row = _row(name, arm, metric, by, head, verdicts.get(arm, NOT_TESTED), cold_pair)
                note = f"prompts not read from the cache: {', '.join(cold)}" if cold else ""
                if w.groups and notes and notes.get(arm):
                    note = notes[arm]
                row |= {"note": note} if note else {}
                row |= {"load": w.label} | _quantiles(mine, arm, metric)
                found.append(row)
    return found


def _row(
    name: str,
    arm: str,
    metric: str,
    by: Mapping[str, Mapping[int, float]],
    head: Mapping[str, str],
    verdict: str,
    cold: bool,
) -> dict[str, Any]:
    row = {"backend": head["backend"], "workload": name, "arm": arm, "metric": metric}
    row |= stats.spread(list(by[arm].values())) | {"ratio": None}
    if arm == OURS and verdict == BITWISE and not cold:
        row |= stats.paired(by[arm], by.get(NORMAL, {})) or {}
    row |= {"verdict": verdict, "key": head["key"], "rounds": len(by[arm])}
    return row | {"model": head["model"]}


def _by_round(mine: Sequence[Mapping], arm: str, metric: str) -> dict[int, float]:
    return {m["round"]: m["metrics"][metric] for m in mine if m["arm"] == arm}


def _least_cached(mine: Sequence[Mapping], arm: str) -> int:
    return min((m["cached"] or 0 for m in mine if m["arm"] == arm), default=0)


def _quantiles(mine: Sequence[Mapping], arm: str, metric: str) -> dict[str, list[float]]:
    """Of the latest round, on the row of the median."""
    name = metric.replace("_p50_", "_")
    told = [
        m["quantiles"][name] for m in mine if m["arm"] == arm and name in m.get("quantiles", {})
    ]
    return {"quantiles": told[-1]} if told and "_p50_" in metric else {}


def facts(
    workload: str, values: Mapping[str, Mapping[str, float]], head: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Rows of single figures of each arm, such as its start-up time: arm -> metric -> value."""
    return [
        {"backend": head["backend"], "workload": workload, "arm": arm, "metric": metric}
        | {"value": value, "min": value, "max": value, "ratio": None}
        | {"verdict": NOT_TESTED, "key": head["key"], "rounds": 1, "model": head["model"]}
        for arm, mine in values.items()
        for metric, value in mine.items()
    ]


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both documents in one: new rows take the place of those with the same id, and come last.

    Rows of another key stay, and so do rows of more rounds and the same verdict: a sitting that is
    cut short takes nothing away. Raises ValueError for results of two machines.
    """
    if old and new and old["gpu"] != new["gpu"]:
        raise ValueError(
            f"results of {new['gpu']!r} cannot be merged into those of {old['gpu']!r}; "
            "name another folder"
        )
    found = {"gpu": new.get("gpu", old.get("gpu"))}
    found |= {"rows": _replaced(old.get("rows", ()), new.get("rows", ()), _ID)}
    return found | {"servers": _replaced(old.get("servers", ()), new.get("servers", ()), _ARM)}


def _replaced(old: Iterable[dict], new: Iterable[dict], fields: Sequence[str]) -> list[dict]:
    def name(row: Mapping[str, Any]) -> tuple:
        return tuple(row[f] for f in fields)

    before = {name(r): r for r in old}
    fresh = {name(r): r for r in new if not _worse(r, before.get(name(r)))}
    return [*(r for r in before.values() if name(r) not in fresh), *fresh.values()]


def _worse(new: Mapping[str, Any], old: Mapping[str, Any] | None) -> bool:
    """Whether a new row has fewer rounds than the old one, and tells nothing else."""
    if old is None or new.get("verdict") != old.get("verdict"):
        return False
    return new.get("rounds", 1) < old.get("rounds", 1)


def newest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the newest key for each backend and workload, in the order of the rows."""
    key = {(r["backend"], r["workload"]): r["key"] for r in rows}
    return [r for r in rows if key[r["backend"], r["workload"]] == r["key"]]


def rounds_under(
    rows: Sequence[dict[str, Any]], backend: str, arm: str, key: str, model: str
) -> dict[str, int]:
    """Workload -> rounds of an arm under this backend, key and model."""
    wanted = (backend, arm, key, model)
    mine = [r for r in rows if (r["backend"], r["arm"], r["key"], r["model"]) == wanted]
    return {r["workload"]: r["rounds"] for r in mine}


def load(folder: Path) -> dict[str, Any]:
    """What e2e.json of a folder holds; nothing where there is none."""
    path = folder / NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(folder: Path, document: Mapping[str, Any]) -> None:
    """e2e.json of a folder, a row a line."""
    head = json.dumps({**document, "rows": [], "servers": []}, indent=1)
    for name in ("rows", "servers"):
        lines = ",\n".join(f"  {json.dumps(r)}" for r in document[name])
        head = head.replace(f'"{name}": []', f'"{name}": [\n{lines}\n ]')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(head + "\n", encoding="utf-8")
