"""The place where simulated attacks plug in: packages add them as entry points in the group ``fedkace_flwr.attacks``.

The attacks of the study ``poisoning`` are in ``experiments/attacks.py``.
"""

from fedkace_flwr import plugins
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.flower.internals import Mod
from fedkace_flwr.sources import Source


class Attack:
    """What the hostile clients of a simulation do; by default, what honest ones do.

    Parameters
    ----------
    config : Config
        The configuration, with the preset of its method.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def is_hostile(self, client: int) -> bool:
        """Whether a client is one of the ``hostile-clients``."""
        clients = self.config.stream.clients
        return clients - self.config.attack.hostile_clients <= client < clients

    def check(self, *, sends_models: bool, trains_on_chunks: bool) -> None:
        """Check that the attack changes anything; a method would seem perfectly robust against one that does not.

        Parameters
        ----------
        sends_models : bool
            Whether the method's clients answer training messages with models.
        trains_on_chunks : bool
            Whether they train on the chunks of their source.

        Raises
        ------
        ConfigError
            It would do nothing.
        """

    def source(self, source: Source, client: int) -> Source:
        """The source of samples of any client, in place of its true one."""
        return source

    def modifier(self, experiment: Experiment) -> Mod | None:
        """A modifier of any client's training messages, whose replies it may alter."""
        return None


def attack_of(config: Config) -> Attack | None:
    """The attack that a configuration names; None if it names none.

    Raises
    ------
    ConfigError
        It is not installed, or cannot be loaded.
    """
    name = config.attack.name
    if name == "none":
        return None
    found = plugins.loaded("attack", name)
    if found is None:
        known = ["none", *plugins.found("attack")]
        raise ConfigError(
            f"attack = {name!r}: is not installed here; must be one of {', '.join(known)}{closest(name, known)}"
        )
    if not (isinstance(found, type) and issubclass(found, Attack)):
        raise plugins.broken("attack", name, "must be a subclass of fedkace_flwr.privacy.hostile.Attack")
    return found(config)
