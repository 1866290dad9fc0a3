"""The part of a push that goes to servers without a stage (vLLM, SGLang): checked before anything moves, loaded whole,
tensor by tensor, when all the others have everything."""

from __future__ import annotations

from ..peers import Peers
from .feed import SourceFeed
from .fleet import Fleet
from .rounds import Agenda, Clock, Round


def has_fences(agenda: Agenda) -> bool:
    return len(agenda.all) > len(agenda.urls)


def check(round_: Round, feed: SourceFeed, agenda: Agenda) -> None:
    """Every fenced server looks at names, shapes and types. Raises ServerRefused; no server was paused."""

    def act(fleet: Fleet) -> None:
        for sink in fleet.fenced([m for m in fleet.members if m.url in agenda.all]):
            sink.check(feed.wanted(), agenda.version)

    round_.lead("Checking the fenced servers", act)


def load(round_: Round, peers: Peers, feed: SourceFeed, agenda: Agenda, clock: Clock) -> None:
    """Pause the fenced servers and write over their weights. They take whole tensors from the first rank; the others
    give it what they hold of them."""

    def act() -> None:
        fleet = round_.fleet
        if fleet is None:
            feed.serve()
            return
        try:
            for sink in fleet.fenced([m for m in fleet.members if m.url in agenda.all]):
                sink.load(feed, agenda.version)
        finally:
            feed.end()

    with clock.phase("load"):
        peers.together("Loading the fenced servers", act)
