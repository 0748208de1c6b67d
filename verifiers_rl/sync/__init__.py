"""Weights from the trainer to inference servers."""

from typing import TYPE_CHECKING

from verifiers_rl.lazy import load_on_first_use

if TYPE_CHECKING:
    from verifiers_rl.sync.agreement import check_agreement as check_agreement
    from verifiers_rl.sync.pool import ServerPool as ServerPool
    from verifiers_rl.sync.sources import check_adapter as check_adapter
    from verifiers_rl.sync.sources import full_sources as full_sources
    from verifiers_rl.sync.sources import gathering as gathering
    from verifiers_rl.sync.sources import in_checkpoint_form as in_checkpoint_form
    from verifiers_rl.sync.sources import is_split as is_split
    from verifiers_rl.sync.weight_sync import WeightSync as WeightSync

HOME = {
    "check_adapter": "sources",
    "full_sources": "sources",
    "in_checkpoint_form": "sources",
    "ServerPool": "pool",
    "WeightSync": "weight_sync",
    "check_agreement": "agreement",
    "gathering": "sources",
    "is_split": "sources",
}
__getattr__, __dir__ = load_on_first_use(__name__, HOME)
