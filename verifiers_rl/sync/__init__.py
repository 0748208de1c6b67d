"""Weights from the trainer to inference servers."""

from typing import TYPE_CHECKING

from verifiers_rl.lazy import load_on_first_use

if TYPE_CHECKING:
    from verifiers_rl.sync.agreement import check_agreement
    from verifiers_rl.sync.pool import ServerPool
    from verifiers_rl.sync.sources import full_sources, in_checkpoint_form
    from verifiers_rl.sync.weight_sync import WeightSync

HOME = {
    "check_agreement": "agreement",
    "full_sources": "sources",
    "in_checkpoint_form": "sources",
    "ServerPool": "pool",
    "WeightSync": "weight_sync",
}
__getattr__, __dir__ = load_on_first_use(__name__, HOME)
