"""What the load does next: a random act, from the requests that have an oracle."""

from __future__ import annotations

import random
import secrets
from collections import defaultdict

from sgl_det.soak.send import (
    ABORT,
    ABORT_STREAM,
    COMPLETIONS,
    CUT_SHORT,
    DISCONNECT,
    LEAVE,
    MANY,
    PLAIN,
    STREAM,
    Act,
    Book,
    ways,
)

# Of every way that a request has, its share.
_SHARES = {PLAIN: 30, STREAM: 20, "quiet": 14, MANY: 10, COMPLETIONS: 10}
_SHARES |= {ABORT: 4, ABORT_STREAM: 4, DISCONNECT: 5, LEAVE: 3}
# Of the kinds: all but these have 2. A long prompt costs more than it compares.
_KIND_SHARES = {"long": 1, "long_answer": 4}
_WHOLE = (PLAIN, STREAM, "quiet")
_INTERVALS = (1, 3, 7, 50)
_MOST_IN_A_LIST = 8


class Draw:
    """Random acts. An act is a list: the turns of a conversation follow each other."""

    def __init__(self, book: Book, rng: random.Random, pace_s: float):
        self._book, self._rng, self._pace_s = book, rng, pace_s
        self._number = 0
        self._run = secrets.token_hex(5)  # two soaks of one seed do not abort each other's
        self._kinds: dict[str, list[str]] = defaultdict(list)
        groups: dict[str, list[str]] = defaultdict(list)
        for name, entry in book.items():
            self._kinds[entry.item.kind].append(name)
            if entry.item.kind in ("multi_turn", "shared_prefix"):
                groups[name.rpartition("-")[0]].append(name)
        self._groups = dict(groups)
        self._lists = [n for n, e in book.items() if MANY in ways(e.item)]

    def one(self) -> list[Act]:
        """Any kind, any way; the whole conversation where it is one."""
        kinds = [*self._kinds]
        kind = self._rng.choices(kinds, [_KIND_SHARES.get(k, 2) for k in kinds])[0]
        name = self._rng.choice(self._kinds[kind])
        if kind == "multi_turn":
            turns = self._groups[name.rpartition("-")[0]]
            return [self._act(turn, _WHOLE) for turn in turns[:-1]] + [self._act(turns[-1])]
        return [self._act(name)]

    def each(self) -> list[list[Act]]:
        """Every kind that there is, to the end, and every way to send that any of them has."""
        acts = [[self._act(self._rng.choice(n), _WHOLE)] for n in self._kinds.values()]
        for way in _SHARES:
            names = [n for n, e in self._book.items() if way in ways(e.item)]
            acts += [[self._act(self._rng.choice(names), (way,))]] if names else []
        return acts

    def alike(self, most: int) -> list[list[Act]]:
        """One request several times at once, or all that share a prefix."""
        if self._groups and self._rng.random() < 0.5:
            names = self._rng.choice([*self._groups.values()])
        else:
            kind = self._rng.choice([*self._kinds])
            names = [self._rng.choice(self._kinds[kind])] * self._rng.randint(2, 12)
        return [[self._act(name)] for name in names[:most]]

    def pressing(self, most: int, tokens: float) -> list[list[Act]]:
        """Requests with long answers that hold so many tokens, up to `most`; none is cut short."""
        growing = sorted(self._book, key=lambda n: -self._book[n].item.new_tokens)
        growing = growing[: max(8, len(growing) // 3)]
        self._rng.shuffle(growing)
        found = []
        while tokens > 0 and len(found) < most:
            name = growing[len(found) % len(growing)]
            tokens -= self._book[name].item.footprint
            found.append([self._act(name, _WHOLE)])
        return found

    def _act(self, name: str, allowed: tuple[str, ...] = tuple(_SHARES)) -> Act:
        rng, item = self._rng, self._book[name].item
        possible = [w for w in ways(item) if w in allowed]
        way = rng.choices(possible, [_SHARES[w] for w in possible])[0]
        names, options = (name,), {}
        if way == MANY:
            more = rng.choices(self._lists, k=rng.randint(1, _MOST_IN_A_LIST - 1))
            names = (name, *more)
        if way in (STREAM, DISCONNECT, ABORT_STREAM) and "sampling_params" in item.body:
            options["interval"] = rng.choice(_INTERVALS)
        if way == DISCONNECT:
            options["after"] = rng.randint(1, max(1, item.new_tokens // 2))
        elif way in CUT_SHORT:
            options["after"] = round(self._pace_s * 8 * rng.random() ** 2, 4)
        if way in (ABORT, ABORT_STREAM):
            # SGLang aborts every request whose id begins so: all are of one length.
            self._number += 1
            options["rid"] = f"soak-{self._run}-{self._number:010d}"
        return Act(names, way, options)
