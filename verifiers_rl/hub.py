"""Uploads to the Hugging Face hub: what Trainer uploads, without what a run knows of people's data.

Trainer uploads all of output_dir but its checkpoints. Here that folder also has every rollout, logs
and the run's options. So only the model, its card, its tokenizer, metrics.jsonl and curves.png are
uploaded, and of checkpoints everything but the pickled options, which can hold a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import Trainer
from transformers.trainer_utils import HubStrategy

from verifiers_rl.report.model_card import write_model_card
from verifiers_rl.report.run_folder import CARD, CURVES, MERGED, METRICS, MODEL_FILES

_OPTIONS = "training_args.bin"
_UPLOADED = [*(name for name in MODEL_FILES if name != _OPTIONS), CARD, METRICS, CURVES]
_UPLOADED.append(f"{MERGED}/*")
_IGNORED = ["_*", ".*", "checkpoint-*", _OPTIONS, f"*/{_OPTIONS}"]


class HubTrainer(Trainer):
    """A Trainer that uploads only what is listed above."""

    _env: Any  # the environment, as passed to `RLTrainer`

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model into output_dir and upload it. Every rank calls this.

        Returns:
            On rank 0 the commit, or a future of it if not `blocking`.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        self.create_model_card(**kwargs)
        return self.push_final(commit_message, blocking, token, revision)

    def push_final(
        self,
        commit_message: str | None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
    ) -> Any:
        """Upload the model that output_dir has; returns as `push_to_hub`."""
        if not self.is_world_process_zero():
            return None
        args = self.args
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self._finish_current_push()
        return _upload(
            self, Path(args.output_dir or ""), commit_message, blocking=blocking,
            token=token or args.hub_token, revision=revision or args.hub_revision,
        )  # fmt: skip

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card. push_to_hub() calls this."""
        if self.is_world_process_zero():
            write_model_card(Path(self.args.output_dir or ""), self.model, cast(Any, self.args),
                             self.state, self._env)  # fmt: skip

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the folder has no name yet. `Checkpoints.save` uploads it later."""


def push_checkpoint(trainer: Any, checkpoint: Path) -> bool:
    """Begin to upload a checkpoint as `hub_strategy` asks: its model, and for "checkpoint" and
    "all_checkpoints" also all of it. On rank 0; the others do nothing.

    Returns:
        whether an upload has begun. While an earlier one runs, a new one begins only with
        `hub_always_push`, as in Trainer.
    """
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return False
    running = trainer.push_in_progress
    if running is not None and not running.is_done() and not args.hub_always_push:
        return False
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    message = f"Training in progress, step {trainer.state.global_step}"
    common = {"blocking": False, "token": args.hub_token, "revision": args.hub_revision}
    jobs = [_upload(trainer, checkpoint, message, **common)]
    names = {HubStrategy.CHECKPOINT: "last-checkpoint"}
    names[HubStrategy.ALL_CHECKPOINTS] = checkpoint.name
    if name := names.get(args.hub_strategy):
        whole = _upload(trainer, checkpoint, f"{message}, checkpoint", path_in_repo=name, **common)
        jobs.append(whole)
    if running is None or running.is_done():
        from transformers.utils import PushInProgress

        trainer.push_in_progress = PushInProgress(cast(Any, jobs))
    else:
        running.jobs.extend(jobs)
    return True


def _upload(
    trainer: Any,
    folder: Path,
    message: str | None,
    *,
    blocking: bool,
    token: str | None,
    revision: str | None,
    path_in_repo: str | None = None,
) -> Any:
    """Upload the model of a folder, or with `path_in_repo` all of the folder."""
    from huggingface_hub import HfApi

    api: Any = HfApi()
    return api.upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=str(folder),
        path_in_repo=path_in_repo,
        commit_message=message,
        token=token,
        run_as_future=not blocking,
        allow_patterns=None if path_in_repo else _UPLOADED,
        ignore_patterns=_IGNORED if path_in_repo is None else [_OPTIONS],
        revision=revision,
    )
