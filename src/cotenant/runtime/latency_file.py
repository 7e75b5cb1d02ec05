"""The latencies that were measured, kept in the data folder from one start of a server to the next."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from cotenant.durable import write_atomically
from cotenant.predictor.predictor import LatencyPredictor

logger = logging.getLogger(__name__)

LATENCY_FOLDER = "latencies"  # in the data folder


class LatencyFile:
    """One file for each pair of hardware and model. That it cannot be read or saved is told in the log: what it holds
    can be measured again."""

    def __init__(self, data_dir: Path, hardware: str, model: str) -> None:
        name = hashlib.sha256(f"{hardware}/{model}".encode()).hexdigest()[:16]
        self.path = data_dir / LATENCY_FOLDER / f"{name}.json"

    def load(self, predictor: LatencyPredictor) -> int:
        """Take over what is there: how many records."""
        try:
            exported = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            logger.warning("measured latencies cannot be read: %s", error)
            return 0
        try:
            return predictor.restore(exported)
        except ValueError as error:
            logger.warning("measured latencies in %s are passed over: %s", self.path, error)
            return 0

    def save(self, predictor: LatencyPredictor) -> None:
        try:
            self.write(predictor)
        except OSError as error:
            logger.warning("measured latencies cannot be kept: %s", error)

    def write(self, predictor: LatencyPredictor) -> None:
        """As ``save``, but raises OSError."""
        exported = predictor.export()

        def write(path: Path) -> None:
            path.write_bytes(exported)

        write_atomically(self.path, write)
