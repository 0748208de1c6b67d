"""Which examples the groups of a batch get, by their positions in the order of examples."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from verifiers_rl.data import ExampleOrder, examples_at
from verifiers_rl.types import BatchOrder

logger = logging.getLogger(__name__)


class Positions:
    """Gives examples to the groups of a batch. All methods may be called on any thread.

    "planned": each step has `max_groups` positions to itself, used or not. A checkpoint keeps the
    next one, which a resumed run needs if its steps have more groups, or fewer.
    "ready": each group takes the next position, and batches take groups in another order. So a
    checkpoint keeps the next position, and those that were begun and not trained.

    Args:
        batch_order: "planned" or "ready".
        example_order: chooses the example of a position.
        max_groups: the most groups that are generated for the groups of one batch.
    """

    def __init__(self, batch_order: BatchOrder, example_order: ExampleOrder, max_groups: int):
        self.batch_order = batch_order
        self.example_order = example_order
        self.max_groups = max_groups
        self._lock = threading.Lock()
        self._next: int | None = None
        self._skipped = 0  # "planned": positions that the steps before a checkpoint had more
        self._returned: deque[int] = deque()  # begun before, and to be begun again
        self._batch_of: dict[int, int | None] = {}  # not trained yet, each with its batch's step

    def examples_of(self, step: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Return the positions that this step's submission may use, each with its example.

        Raises:
            ValueError: `example_order` breaks its contract; see `examples_at`.
        """
        first = step * self.max_groups + self._skipped
        if self.batch_order == "planned":
            positions = range(first, first + self.max_groups)
            examples = examples_at(self.example_order, positions, sizes)
            return zip(positions, examples, strict=True)
        with self._lock:
            self._next = first if self._next is None else self._next
        return self._draw(sizes)

    def _draw(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        for _ in range(self.max_groups):
            with self._lock:
                assert self._next is not None
                if self._returned:
                    position = self._returned.popleft()
                else:
                    position, self._next = self._next, self._next + 1
                self._batch_of[position] = None
            (example,) = examples_at(self.example_order, range(position, position + 1), sizes)
            yield position, example

    def reject(self, position: int) -> None:
        """Say that the filter has rejected this position's group, which will not be trained."""
        with self._lock:
            self._batch_of.pop(position, None)

    def assign(self, positions: Sequence[int], step: int) -> None:
        """Say that the batch of this step has these positions."""
        if self.batch_order == "planned":
            return
        with self._lock:
            self._batch_of |= dict.fromkeys(positions, step)

    def drop_before(self, step: int) -> None:
        """Forget the positions of batches before this step, which were trained."""
        with self._lock:
            kept = {p: batch for p, batch in self._batch_of.items() if _is_left(batch, step)}
            self._batch_of = kept

    def give_back(self, step: int) -> None:
        """Let the positions that have no batch before this step be drawn again."""
        with self._lock:
            left = sorted(p for p, batch in self._batch_of.items() if _is_left(batch, step))
            self._returned = deque([*left, *self._returned])
            self._batch_of = {p: b for p, b in self._batch_of.items() if not _is_left(b, step)}

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what a run that continues at this step needs."""
        if self.batch_order == "planned":
            return {"step": step, "first_position": step * self.max_groups + self._skipped}
        with self._lock:
            left = sorted(p for p, batch in self._batch_of.items() if _is_left(batch, step))
            return {"next_position": self._next, "untrained": [*left, *self._returned]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what had not been trained. One group of a state of the other order may be
        trained again or left out.
        """
        if "first_position" in state:
            self._skipped = state["first_position"] - state["step"] * self.max_groups
            if self._skipped:
                logger.warning(
                    "the steps of the checkpoint had more or fewer groups (batch_size, "
                    "rollouts_per_example, max_oversampling): this run goes on with the example "
                    "behind them, number %d in the order of examples", state["first_position"],
                )  # fmt: skip
        elif state and self.batch_order == "ready":
            with self._lock:
                self._next, self._returned = state["next_position"], deque(state["untrained"])


def _is_left(batch: int | None, step: int) -> bool:
    return batch is None or batch >= step
