"""What becomes of a local model before it leaves its client: clipping, noise and masks, by Flower's modifiers."""

import copy
import math

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import make_ffn, secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import NumpyArray, Weights
from fedkace_flwr.privacy import noise
from fedkace_flwr.sections import PrivacyConfig

_SECRET = "fedkace.noise"


def guarded(handler: ClientAppCallable, config: Config, parameters: frozenset[str]) -> ClientAppCallable:
    """A handler of training messages behind the modifiers that the configuration asks for.

    Parameters
    ----------
    handler : callable
        Trains and replies with the local model.
    config : Config
        The configuration.
    parameters : frozenset of str
        Names of what is trained by gradient.
    """
    settings = config.privacy
    chain: list[Mod] = []
    if settings.secagg:
        chain += [secaggplus_mod, _Update(settings, parameters)]
    if settings.dp != "none" or settings.statistics == "local":
        chain.append(_Limit(config, parameters))
    return make_ffn(handler, chain)


class _Limit:
    """Lets out what may travel, clipped and noised; of the rest the reply holds what the server sent.

    Flower's modifiers clip and noise all arrays of a message. They are shown those that travel alone: a ResNet's
    integer counters would take most of the norm, and neither scale nor noise would leave them integers.

    The noise depends on a secret of the device, on what was sent and on what was learned: a round that is asked for
    again gives the same reply, and not another draw of which the mean would be less private.
    """

    def __init__(self, config: Config, parameters: frozenset[str]) -> None:
        self._config = config
        self._settings = config.privacy
        self._parameters = parameters

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if reply.has_error() or keys.ARRAYS not in reply.content.array_records:
            return reply
        sent = keys.unpack(message.content.array_records[keys.ARRAYS])
        learned = keys.unpack(reply.content.array_records[keys.ARRAYS])
        names = noise.travelling(self._settings, learned, self._parameters)
        before: Weights = {name: sent[name] for name in names}
        after: Weights = {name: learned[name] for name in names}
        if self._settings.dp != "none":
            after = self._private(message, context, before, after)
        reply.content[keys.ARRAYS] = keys.array_record({name: after.get(name, sent[name]) for name in learned})
        return reply

    def _private(self, message: Message, context: Context, before: Weights, after: Weights) -> Weights:
        settings = self._settings
        if all(np.array_equal(before[name], after[name]) for name in before):
            raise MessageError(
                "the local model is the one that was sent: Flower's modifiers cannot clip an update of 0"
            )
        answered = self._flowers(message, context, before, after)
        if answered.has_error():
            raise MessageError(f"Flower's modifier: {answered.error.reason}", "error")
        limited = keys.unpack(answered.content.array_records[keys.ARRAYS])
        return noise.with_floor(limited, before) if settings.dp == "local" else limited

    def _flowers(self, message: Message, context: Context, before: Weights, after: Weights) -> Message:
        settings = self._settings
        question = copy.copy(message)
        question.content = RecordDict(
            {
                keys.ARRAYS: keys.array_record(before),
                keys.CONFIG: ConfigRecord({KEY_CLIPPING_NORM: settings.dp_clip}),
            }
        )

        def learned(question: Message, context: Context) -> Message:
            return Message(RecordDict({keys.ARRAYS: keys.array_record(after)}), reply_to=question)

        if settings.dp == "central":
            return fixedclipping_mod(question, context, learned)
        # Its noise is sensitivity * sqrt(2 ln(1.25 / delta)) / epsilon, which is one release's and holds up to
        # epsilon = 1; accounting.py knows what the same noise is worth over all rounds.
        once = math.sqrt(2 * math.log(1.25 / settings.dp_delta))
        modifier = LocalDpMod(settings.dp_clip, settings.dp_noise * settings.dp_clip, once, settings.dp_delta)
        with noise.numpy_noise(noise.fingerprint(self._secret(message, context), before, after)):
            return modifier(question, context, learned)

    def _secret(self, message: Message, context: Context) -> bytes:
        if self._settings.dp_seeded:
            told = message.content.config_records[keys.CONFIG]
            client, number = told[keys.CLIENT], told[keys.ROUND]
            assert isinstance(client, int) and isinstance(number, int)
            return noise.seeded_secret(self._config.run.seed, "client", client, number)
        held = context.state.config_records.setdefault(_SECRET, ConfigRecord({"secret": noise.fresh_secret()}))
        secret = held["secret"]
        assert isinstance(secret, bytes)
        return secret


class _Update:
    """Turns a reply into what SecAgg+ masks: the update, in the form of Flower's earlier interface.

    The update and not the model: it lies around 0 whatever the model, so one range serves all. A client that sat the
    round out adds an update of 0 that weighs nothing; its masks are in the sum all the same.
    """

    def __init__(self, settings: PrivacyConfig, parameters: frozenset[str]) -> None:
        self._settings = settings
        self._parameters = parameters

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        sent = keys.unpack(message.content.array_records[keys.ARRAYS])
        names = noise.travelling(self._settings, sent, self._parameters)
        trained = keys.ARRAYS in reply.content.array_records
        learned = keys.unpack(reply.content.array_records[keys.ARRAYS]) if trained else sent
        update = [learned[name].astype(np.float64) - sent[name] for name in names]
        for name, moved in zip(names, update, strict=True):
            self._check(name, moved)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(update), int(trained), {})
        content = fitres_to_recorddict(result, keep_input=False)
        content[keys.METRICS] = reply.content.metric_records[keys.METRICS]
        return Message(content, reply_to=message)

    def _check(self, name: str, moved: NumpyArray) -> None:
        # Under the mask the server cannot see either: SecAgg+ cuts silently, and a NaN becomes some number.
        largest, limit = float(np.abs(moved).max(initial=0.0)), self._settings.secagg_range
        if not largest <= limit:
            raise MessageError(f"{name} moved by {largest:.4g}; secagg-range = {limit:g} allows less", "values")
