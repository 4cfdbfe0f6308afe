"""What the hub's client says when something cannot be fetched, as one short reason and its remedy.

Boundary: reads the names of the client's exceptions, which move between its versions and those of its HTTP library; fetches nothing, imports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

OFFLINE = "offline mode is on (HF_HUB_OFFLINE) and it is not in the local cache: unset it, or give what is local"
REASONS = {
    "GatedRepoError": "access to it is restricted: ask for it on the hub and log in with `hf auth login`",
    "RevisionNotFoundError": "the hub has it, but not that revision",
    "RepositoryNotFoundError": "the hub has none of that name, or a private one: check the name, or log in with `hf auth login`",
    "DatasetNotFoundError": "the hub has none of that name, or a private one: check the name, or log in with `hf auth login`",
    "HFValidationError": "it is not a hub id of the form ORGANISATION/NAME",
    "OfflineModeIsEnabled": OFFLINE,
}
# Classes that mean that no answer came: of httpx (any version), requests and Python.
NO_ANSWER = ("TransportError", "ConnectionError", "Timeout", "TimeoutException")


def reason(error: BaseException) -> str:
    """Why the hub did not give what was asked for, in words that follow "NAME: ..."."""
    chain = list(_chain(error))
    names = [kind.__name__ for link in chain for kind in type(link).__mro__]
    found = next((REASONS[name] for name in names if name in REASONS), None)
    if found is not None or any(map(_offline, chain)):
        return found or OFFLINE
    if unreachable(error):
        silent = next(link for link in chain if _silent(link))
        return f"the hub cannot be reached ({_text(silent)}) and it is not in the local cache: check the network, or give what is local"
    return f"{type(error).__name__}: {_text(error)}"


def unreachable(error: BaseException) -> bool:
    """Whether the hub gave no answer at all, offline mode apart."""
    return any(_silent(link) for link in _chain(error))


def _silent(error: BaseException) -> bool:
    return any(kind.__name__ in NO_ANSWER for kind in type(error).__mro__) and not _offline(error)


def _offline(error: BaseException) -> bool:
    return "OfflineModeIsEnabled" in (type(error).__name__, *str(error).replace("(", " ").replace(")", " ").split())


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _text(error: BaseException) -> str:
    return re.sub(r"^\[Errno -?\d+\] ", "", " ".join(str(error).split()))[:200] or type(error).__name__
