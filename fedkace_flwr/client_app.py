"""Flower ClientApp: hands each message to the chosen method's client, and its result back as the reply."""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from fedkace_flwr import __version__
from fedkace_flwr.clients.memory import memory_of
from fedkace_flwr.clients.round import StreamingClient
from fedkace_flwr.compute.costs import cpu_meter, peak_memory
from fedkace_flwr.compute.devices import GPU_SHARE, limit_memory
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured, find_method, known_names
from fedkace_flwr.errors import ConfigError, MessageError, StateError
from fedkace_flwr.experiment import Experiment, shared_experiment
from fedkace_flwr.flower.internals import ClientAppCallable
from fedkace_flwr.flower.logs import join_flower_log
from fedkace_flwr.keys import Scalar
from fedkace_flwr.messaging import folding, wire
from fedkace_flwr.privacy.client_mods import guarded
from fedkace_flwr.privacy.hostile import attack_of
from fedkace_flwr.privacy.site_policy import policy_of_site
from fedkace_flwr.queries import OneLineApp, identity, waiting_samples
from fedkace_flwr.registry import METHODS, OWN_METHODS, Method
from fedkace_flwr.sources import InboxSource, Source, StreamSource
from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore, is_locked
from fedkace_flwr.storage.folders import absolute
from fedkace_flwr.storage.names import token
from fedkace_flwr.storage.paths import client_folder, has_own_folder, models_folder

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")


def _configured(context: Context) -> tuple[Method, Config]:
    """The method and the configuration of the run that a message belongs to, if the site's policy accepts it."""
    values = context.run_config
    # With the types, since 1 == 1.0 == True.
    asked, method, config = _parsed(tuple((name, type(values[name]).__name__, values[name]) for name in sorted(values)))
    if config.attack.attack != "none" and has_own_folder(context.node_config):
        raise ConfigError(
            f"attack = {config.attack.attack!r}: for simulations alone; on a node with a folder of its own "
            "(--node-config state-dir, models-dir), must be 'none'"
        )
    policy = policy_of_site(context.node_config, known_names())
    if policy is not None:
        policy.check(asked, config, sends_labels=method.sends_labels)
    return method, config


@lru_cache(maxsize=8)
def _parsed(entries: tuple[tuple[str, str, Scalar], ...]) -> tuple[Config, Method, Config]:
    asked = Config.parse({name: value for name, _, value in entries})
    return asked, *configured(asked)


def _unfold(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Unfold a message that arrives folded, and fold its reply (a modifier)."""
    told = message.content.config_records.get(wire.CONFIG)
    if told is None or not told.get(folding.FOLDED, False):
        return call_next(message, context)
    message.content = folding.unfolded(message.content)
    reply = call_next(message, context)
    if reply.has_content():
        reply.content = folding.folded(reply.content)
    return reply


class _App(OneLineApp):
    """An app that also has the messages of another package's method."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; if the run's method is another package's, register its own messages first."""
        name = context.run_config.get("method")
        if isinstance(name, str) and name not in OWN_METHODS:
            with suppress(ConfigError):  # the handler of the message reports it
                for action in find_method(name).actions:
                    _register(action)
        return super().__call__(message, context)


def _with_frozen(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Find the frozen part that the server names, or answer with the digest of the own one, to be sent it (a modifier).

    One that was sent is kept beside the client's state. Methods whose clients start from more than that part are not
    sent it.
    """
    content = message.content
    digest = content.config_records.get(wire.CONFIG, ConfigRecord()).get(wire.FROZEN)
    sent = content.array_records.get(wire.FROZEN)
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        return call_next(message, context)
    method, config = _configured(context)
    if not method.client.receives_model:
        return call_next(message, context)
    experiment = _experiment(config)
    folder = client_folder(config, context.run_id, _number(message, wire.CLIENT), context.node_config)
    path = folder / f"{wire.FROZEN}-{digest}.npz"
    if sent is not None:
        wire.check_size(RecordDict({wire.FROZEN: sent}), experiment.frozen_shapes)
        part = wire.checked_arrays(sent, experiment.frozen_shapes)
        experiment.take_frozen(part, digest)
        atomic.write(path, part, {})
        for other in folder.glob(f"{wire.FROZEN}-*.npz"):
            if other != path:
                other.unlink(missing_ok=True)
        del content[wire.FROZEN]
    elif (own := _own_frozen(experiment, path, digest)) != digest:
        return Message(RecordDict({wire.CONFIG: ConfigRecord({wire.FROZEN: own})}), reply_to=message)
    return call_next(message, context)


def _own_frozen(experiment: Experiment, path: Path, digest: str) -> str:
    """The digest of the frozen part that this process has, if need be from the file of one that was sent."""
    if path.exists() and experiment.taken != digest:
        try:
            atomic.read(path, parse=lambda part, record: experiment.take_frozen(part, digest))
        except StateError as error:
            logger.warning("%s; the server is asked for it", error)
    try:
        return experiment.frozen_digest
    except ConfigError as error:
        logger.warning("%s; the server is asked for the frozen part", error)
        return ""


app = _App(mods=[_unfold, _with_frozen])
app.query()(identity)
join_flower_log()


@app.query(wire.WAITING)
def waiting(message: Message, context: Context) -> Message:
    """Say how many samples wait, if the site's policy accepts the run, and for which classes, if names may leave."""
    _configured(context)
    reply = waiting_samples(message, context)
    policy = policy_of_site(context.node_config)
    if policy is not None and not policy.new_classes:
        reply.content.config_records[wire.CONFIG].pop(wire.NEW_CLASSES, None)
    return reply


@app.query(wire.WORKING)
def working(message: Message, context: Context) -> Message:
    """Say whether a process on this machine is at work on a client."""
    _, config = _configured(context)
    folder = client_folder(config, context.run_id, _number(message, wire.CLIENT), context.node_config)
    return Message(RecordDict({wire.CONFIG: ConfigRecord({wire.WORKING: is_locked(folder)})}), reply_to=message)


def _guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Apply the modifiers of privacy, and attacks, that the configuration asks for (a modifier)."""
    _, config = _configured(context)
    attack = attack_of(config)
    if not (attack or config.privacy.hides or config.privacy.batchnorm_statistics != "shared"):
        return call_next(message, context)
    experiment = _experiment(config)
    modifier = attack.modifier(experiment) if attack else None
    return guarded(call_next, config, experiment.travelling.update, modifier)(message, context)


@app.train(mods=[_guard])
def train(message: Message, context: Context) -> Message:
    """Train one round and return the local model."""
    with _client(message, context) as (client, number):
        answer = client.train(_weights(message, client), number)
        content = wire.reply_content(answer.arrays or None, answer.examples, answer.metrics)
        return _reply(message, client, content, number)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Take the new global model and test the model that answers."""
    with _client(message, context) as (client, number):
        examples, metrics = client.test(_weights(message, client), number)
        return _reply(message, client, wire.reply_content(None, examples, metrics), number)


@app.query(wire.GATE)
def gate(message: Message, context: Context) -> Message:
    """Test a candidate for the global model and the accepted one on the client's own samples."""
    with _client(message, context) as (client, number):
        candidate, accepted = (_weights(message, client, name) for name in (wire.ARRAYS, wire.ACCEPTED))
        return Message(wire.reply_content(None, *client.judge(candidate, accepted, number)), reply_to=message)


_cpu_seconds = cpu_meter()


def _reply(message: Message, client: StreamingClient, content: RecordDict, number: int) -> Message:
    """The reply with this content, with the names of classes that wait for a number, and with the costs of a device.

    What a repeated answer costs is not what its round has cost: costs are no part of the answer that is stored.
    """
    source = client.rule.source
    told = ConfigRecord()
    if names := {*source.new_classes(number), *(client.unnamed if source.tells else ())}:
        told[wire.NEW_CLASSES] = sorted(names)[: wire.MOST_NEW_CLASSES]
    if client.is_device:
        told[wire.VERSION] = __version__
        metrics = content.metric_records[wire.METRICS]
        metrics[wire.PEAK_MEMORY] = peak_memory()
        metrics[wire.CPU_SECONDS] = _cpu_seconds()
    if told:
        content[wire.CONFIG] = told
    return Message(content, reply_to=message)


_registered: set[str] = set()


def _register(action: str) -> None:
    """Route a method's own messages, ``train.NAME`` or ``query.NAME``, to its client; once."""
    if action in _registered:
        return
    _registered.add(action)
    kind, _, name = action.partition(".")

    @getattr(app, kind)(name)  # type: ignore[untyped-decorator]
    def handle(message: Message, context: Context) -> Message:
        with _client(message, context) as (client, number):
            content = client.act(action, message.content, number)
            if action == client.rule.training_action:
                return _reply(message, client, content, number)
            return Message(content, reply_to=message)


for _action in sorted({action for name in OWN_METHODS for action in METHODS[name].actions}):
    _register(_action)


@contextmanager
def _client(message: Message, context: Context) -> Iterator[tuple[StreamingClient, int]]:
    """The client that a message is for, and the round; its folder stays locked until the message is handled."""
    number, round_number, run = _number(message, wire.CLIENT), _number(message, wire.ROUND), _run(message)
    method, config = _configured(context)
    if round_number < 1 or 0 < config.stream.rounds < round_number:
        raise MessageError(f"{wire.ROUND} = {round_number}: the run has rounds 1 to {config.stream.rounds}")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    experiment = _experiment(config)
    limit_memory(experiment.device, _share_of_gpu() or 0.0)
    told = message.content.config_records[wire.CONFIG]
    _check_frozen(experiment, told.get(wire.FROZEN, ""))
    classes = wire.agreed_classes(told, experiment.num_classes) if config.data.grows else None
    source = _source(experiment, number, run, context.node_config, classes)
    unmet = torch.zeros(experiment.num_classes, dtype=torch.bool)
    digest = experiment.dataset.split_digest or experiment.dataset.digest
    empty = ClientState(unmet, source.none(), run=run, client=number, names=source.class_names, dataset=digest)
    folder = client_folder(config, context.run_id, number, context.node_config)
    store = ClientStore(folder, empty, memory_of(config, number))
    models = models_folder(config, context.run_id, number, context.node_config)
    with store.locked():
        rule = method.client(number, experiment, source, store)
        client = StreamingClient(rule, message.content, models, on_device=has_own_folder(context.node_config))
        yield client, round_number


def _check_frozen(experiment: Experiment, told: object) -> None:
    own = experiment.frozen_digest
    if told != own:
        raise MessageError(
            f"{wire.FROZEN} = {wire.shown(told)}: the frozen part of this device's network has the digest {own}; must be "
            f"the server's: {_where_from(experiment.config)}"
        )


def _where_from(config: Config) -> str:
    if name := config.model.weights_file:
        return f"copy the server's file to the same path, weights-file = {name!r:.200}"
    if config.model.pretrained:
        return "copy the server's cache (HF_HOME for timm, TORCH_HOME for torchvision)"
    return "processors differ; give all a copy of one weights-file"


def _number(message: Message, name: str) -> int:
    told = message.content.config_records.get(wire.CONFIG, ConfigRecord())
    if type(value := told.get(name)) is not int:
        raise MessageError(f"{name} = {wire.shown(value)}: must be a whole number")
    return value


def _run(message: Message) -> str:
    """The text by which a client recognises its state of a run; it names a folder, and is shown."""
    run = message.content.config_records[wire.CONFIG].get(wire.RUN, "")
    if not isinstance(run, str) or (run and token(run) != run):
        raise MessageError(f"{wire.RUN} = {wire.shown(run)}: must be at most 64 letters and digits")
    return run


def _experiment(config: Config) -> Experiment:
    """The experiment of this process, on the device that it may use."""
    return shared_experiment(config, _share_of_gpu())


def _share_of_gpu() -> float | None:
    """The share of a GPU that Ray, or whoever started this process, has assigned to it; None if nobody has."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0))
    told = os.environ.get(GPU_SHARE, "")
    return float(told) if told else None


def _source(
    experiment: Experiment,
    number: int,
    run: str,
    node_config: Mapping[str, Scalar],
    classes: wire.AgreedClasses | None,
) -> Source:
    policy = policy_of_site(node_config) if classes is not None else None
    tells = policy is None or policy.new_classes
    if not experiment.config.data.arrives:
        source: Source = StreamSource(experiment, number, classes, tells=tells)
        attack = attack_of(experiment.config)
        return attack.source(source, number) if attack else source
    inbox, test = (str(node_config.get(name, "")) for name in (wire.INBOX, wire.TEST))
    if not inbox:
        raise MessageError(
            f"--node-config: no {wire.INBOX}; with dataset = 'inbox', start the SuperNode with "
            f"--node-config '{wire.INBOX}=\"FOLDER\" ...'"
        )
    tests = absolute(test, wire.TEST) if test else None
    return InboxSource(experiment, absolute(inbox, wire.INBOX), run, tests, classes, tells=tells)


def _weights(message: Message, client: StreamingClient, name: str = wire.ARRAYS) -> wire.Weights:
    """The model in one of a message's records; empty with a method that sends none."""
    experiment, receives = client.rule.experiment, client.rule.receives_model
    sent = message.content.array_records
    content = RecordDict({wire.ARRAYS: sent[name]} if name in sent else {})
    weights = dict(wire.read_arrays(content, experiment.travelling.sent if receives else {}))
    if not receives:
        return {}
    if client.rule.config.privacy.batchnorm_statistics == "local":
        weights |= _own_statistics(client, message)
    return weights | experiment.fixed_weights  # rounding, or noise on the mean, may have moved them on their way


def _own_statistics(client: StreamingClient, message: Message) -> dict[str, wire.NumpyArray]:
    """Batch-norm statistics of the client's last local model; none before its first training."""
    store, parameters = client.rule.store, client.rule.experiment.parameter_names
    number = _number(message, wire.ROUND)
    before = number if message.metadata.message_type == MessageType.TRAIN else number + 1
    last = store.answer(store.before(before).round)
    held = last.model if last else {}
    return {name: array for name, array in held.items() if name not in parameters}
