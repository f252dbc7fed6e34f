"""Every configuration key, by name."""

from fedkace_flwr.config import all_keys
from fedkace_flwr.keys import Key, Scalar, default_of

KEYS: dict[str, tuple[Scalar, Key]] = {
    name: (default_of(section, name.replace("-", "_")), declared) for section, name, declared in all_keys()
}
