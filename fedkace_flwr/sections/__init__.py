"""The core sections of the configuration: every key that does not belong to a method."""

from fedkace_flwr.sections.data import DataConfig
from fedkace_flwr.sections.runs import (
    DELTA,
    SECAGG_RANGE,
    SMALLEST_SUM,
    AggregationConfig,
    AnswerConfig,
    AttackConfig,
    BufferConfig,
    ModelConfig,
    PrivacyConfig,
    RunConfig,
    TrainingConfig,
)
from fedkace_flwr.sections.stream import StreamConfig

__all__ = [
    "DELTA",
    "SECAGG_RANGE",
    "SMALLEST_SUM",
    "AggregationConfig",
    "AnswerConfig",
    "AttackConfig",
    "BufferConfig",
    "DataConfig",
    "ModelConfig",
    "PrivacyConfig",
    "RunConfig",
    "StreamConfig",
    "TrainingConfig",
]
