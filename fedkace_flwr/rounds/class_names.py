"""The classes of a run whose classes are open: clients bring names, and the server gives each the next number."""

import logging
from collections.abc import Mapping
from typing import Any
from unicodedata import normalize

from flwr.app import ConfigRecord, RecordDict

from fedkace_flwr.keys import is_class_name
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import AgreedClasses
from fedkace_flwr.sections import DataConfig

logger = logging.getLogger(__name__)

CLASSES = "class-names"
"""Where a checkpoint's record keeps them."""

_MOST_WARNINGS = 1000  # names without a number; a hostile client could bring new ones for ever


class ClassNames:
    """The agreed classes, and the names that clients have brought since the last round.

    Parameters
    ----------
    settings : DataConfig
        Whether classes are open, the first names, and how many there may be.

    Attributes
    ----------
    agreed : AgreedClasses
        Those that have a number; none if the classes are fixed.
    """

    def __init__(self, settings: DataConfig) -> None:
        names = settings.named_classes() if settings.grows else ()
        self._grows = settings.grows
        self._most = settings.max_classes
        self.agreed = AgreedClasses(names, (0,) * len(names))
        self._brought: dict[str, set[int]] = {}
        self._without_number: set[str] = set()

    def told(self) -> dict[str, Any]:
        """Fields for the configuration of each message; none if the classes are fixed."""
        return self.agreed.told() if self._grows else {}

    @property
    def are_due(self) -> bool:
        """Whether the end of a round would give a name a number."""
        return bool(self._brought) and len(self.agreed.names) < self._most

    def take(self, client: int, content: RecordDict) -> None:
        """Take the names that a reply brings. A name that cannot be one is ignored, with a warning."""
        record = content.config_records.get(wire.CONFIG, ConfigRecord())
        found = record.get(wire.NEW_CLASSES)
        if not self._grows or not isinstance(found, list):
            return
        refused = []
        for text in found[: wire.MOST_NEW_CLASSES]:
            name = normalize("NFC", text) if isinstance(text, str) else ""
            if not is_class_name(name):
                refused.append(text)
            elif name not in self.agreed.names:
                self._brought.setdefault(name, set()).add(client)
        if refused:
            logger.warning("client %d: no names of classes, and ignored: %s", client, wire.shown(refused))

    def settle(self, number: int) -> list[str]:
        """Give the names that came in a round the next numbers, in sorted order, and return them.

        All names of a round are sorted, so that a number depends neither on the order of replies nor on which of the
        clients that bring a name answers. They count from the next round. Names for which there is no number are
        brought again; each is warned of once.
        """
        brought, self._brought = sorted(self._brought.items()), {}
        left = self._most - len(self.agreed.names)
        settled = [name for name, _ in brought[:left]]
        for name, clients in brought[:left]:
            logger.info("class %s: from now on a class of the run, brought by clients %s", name, sorted(clients))
        for name, clients in brought[left:]:
            if name not in self._without_number and len(self._without_number) < _MOST_WARNINGS:
                self._without_number.add(name)
                logger.warning(
                    "class %s, brought by clients %s: there is no number for it, max-classes = %d; its samples wait",
                    name,
                    sorted(clients),
                    self._most,
                )
        rounds = self.agreed.rounds + (number + 1,) * len(settled)
        self.agreed = AgreedClasses((*self.agreed.names, *settled), rounds)
        return settled

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, JSON-ready; empty if the classes are fixed."""
        return self.told()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with what :meth:`state` gave."""
        if self._grows:
            self.agreed = wire.agreed_classes(state, self._most)
