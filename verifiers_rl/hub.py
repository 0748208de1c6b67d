"""The card of the trained model, and its upload to the Hugging Face hub.

Trainer uploads all of output_dir but its checkpoints. Here that folder also has every rollout, logs
and the run's options, which can hold a token. So only the final model, its card, its tokenizer and
metrics.jsonl are uploaded.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import Trainer

from verifiers_rl.report.run_folder import (
    CARD,
    CARD_MARK,
    MERGED,
    METRICS,
    MODEL_FILES,
    is_hub_name,
    summary,
)

if TYPE_CHECKING:
    from verifiers_rl.checkpoints import Checkpoints

_OPTIONS = "training_args.bin"
_UPLOADED = [*(name for name in MODEL_FILES if name != _OPTIONS), CARD, METRICS]
_UPLOADED.append(f"{MERGED}/*")
_IGNORED = ["_*", ".*", "checkpoint-*", _OPTIONS, f"*/{_OPTIONS}"]


class SavingTrainer(Trainer):
    """A Trainer that saves through `Checkpoints`, and uploads only what is listed above."""

    checkpoints: Checkpoints
    args: Any
    _env: Any  # the environment, as passed to `RLTrainer`

    def _get_output_dir(self, trial: Any) -> str:
        return self.checkpoints.run_dir or super()._get_output_dir(trial)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write README.md into output_dir: of what, on what and how far the model was trained.

        Trainer's own card says of every run that the dataset is unknown, and names a local folder
        as a base model, which the hub refuses.
        """
        if not self.is_world_process_zero():
            return
        folder, model = Path(self.args.output_dir), cast(Any, self.model)
        adapter = next(iter(getattr(model, "peft_config", {}).values()), None)
        base = str(adapter.base_model_name_or_path if adapter else model.name_or_path)
        lines = [
            "---",
            *([f"base_model: {base}"] if is_hub_name(base) else []),
            f"library_name: {'peft' if adapter else 'transformers'}",
            "pipeline_tag: text-generation",
            f"tags: [{self.args.METHOD.replace(' ', '-')}, verifiers_rl]",
            "---",
            CARD_MARK,
            f"# {self.args.run_name or folder.resolve().name}",
            "",
            f"{'An adapter of' if adapter else 'All weights of'} `{base}`, trained by "
            f"{self.args.METHOD} with verifiers_rl {version('verifiers_rl')}.",
            "",
            f"- {self.state.global_step} steps with a batch size of {self.args.batch_size}",
            *(f"- Environment: {name}" for name in environment_names(self._env)),
        ]
        if (folder / METRICS).is_file():
            lines += [f"- {line}" for line in summary(folder / METRICS).splitlines()]
        (folder / CARD).write_text("\n".join([*lines, ""]))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the final model into output_dir and upload it. Every rank calls this.

        Returns:
            On rank 0 the commit, or a future of it if not `blocking`.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.checkpoints.save_final()
        if not self.is_world_process_zero():
            return None
        from huggingface_hub import HfApi

        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        api: Any = HfApi()
        return api.upload_folder(
            repo_id=self.hub_model_id,
            folder_path=str(self.args.output_dir),
            commit_message=commit_message,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            run_as_future=not blocking,
            allow_patterns=_UPLOADED,
            ignore_patterns=_IGNORED,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the final model alone is uploaded."""


def environment_names(env: Any) -> list[str]:
    """Return the name or id of each environment, or of its class if it has none."""
    if env is None:
        return []
    if isinstance(env, list | tuple):
        return [name for one in env for name in environment_names(one)]
    taskset = getattr(getattr(env, "config", None), "taskset", None)
    known = (getattr(env, "name", None), getattr(taskset, "id", None), getattr(env, "env_id", None))
    return [next(filter(None, known), env if isinstance(env, str) else type(env).__name__)]
