"""The table of reactions: what the captures prove and what docs/sglang.md prints.

`python -m tests.rollout.sglang.reactions` writes the table into docs/sglang.md.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.golden import ROOT
from tests.rollout.sglang import captures
from triage_jax.rollout.sglang import errors
from triage_jax.rollout.sglang.errors import SglangError

DOCUMENT = ROOT / "docs" / "sglang.md"
BEGIN, END = "<!-- reactions: generated -->", "<!-- reactions: end -->"


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """One row. `outcome`: an error class, or one of sample, partial, done, true, false."""

    answer: str
    outcome: type[SglangError] | str
    then: str
    """What the engine does next"""
    captures: tuple[str, ...]
    """Patterns of `folder/name`; SGLang 0.5.23 where no folder is given"""

    def covers(self, name: str) -> bool:
        return any(fnmatchcase(name, p if "/" in p else f"{captures.SGLANG}/{p}") for p in self.captures)


REACTIONS: tuple[Reaction, ...] = (
    Reaction(
        answer="200, finished, every check passes",
        outcome="sample",
        then="Returns it, each token with the version of the weights that drew it",
        captures=(
            "gen_across_in_place_update",
            "gen_across_plain_update",
            "gen_across_retract_update",
            "gen_across_pause_in_place",
            "gen_across_pause_retract",
            "gen_ids_logprob_*",
            "gen_sampled_mask_selected",
            "gen_score_only_max1",
            "gen_stop_eos_via_bias",
            "moe_gen_T*",
            "moe_gen_frequency_penalty",
            "moe_gen_routed_experts",
            "orig_logprob_T07",
            "skip_tok_eos",
        ),
    ),
    Reaction(
        answer="200, finish reason `abort` without a status code",
        outcome="partial",
        then="Draws the sample again under a new request id, up to `retries` times; then hands over what there is, "
        "marked `abort`, which the loss leaves out",
        captures=("gen_aborted_nonstream", "gen_across_pause_abort"),
    ),
    Reaction(
        answer="200, score request: log-probabilities of the given ids",
        outcome="done",
        then="Compares them with the learner's after each refit",
        captures=("gen_score_only_max0",),
    ),
    Reaction(
        answer="200, log-probabilities missing (with top-p or top-k: those of the truncated distribution)",
        outcome=errors.BadResponse,
        then="Draws the sample again, on another server if there is one, up to `retries` times; then stops the run",
        captures=(
            "auth_generate_user_key",
            "err_max_new_tokens_null",
            "err_n_zero",
            "err_unknown_top_level_key",
            "gen_abort_prefix_victim",
            "gen_after_sigterm",
            "gen_arrived_during_pause_*",
            "gen_custom_params",
            "gen_hidden_states",
            "gen_killed_by_update_abort_all",
            "gen_null_params",
            "gen_probe",
            "gen_return_entropy",
            "gen_routed_experts_flag_off",
            "gen_running_at_sigterm",
            "gen_sampled_mask_support",
            "gen_sampling_seed_?",
            "gen_stop_token_ids_no_trim",
            "gen_text_minimal",
            "moe_gen_routed_experts_start4",
            "queue_full_req[01]",
            "skip_tok_return_text",
            f"{captures.SGLANG_JAX}/gen_sampled",
            f"{captures.SGLANG_JAX}/gen_seed_a",
        ),
    ),
    Reaction(
        answer="200, a log-probability is null, infinite or positive (weights that hold NaN)",
        outcome=errors.BadResponse,
        then="As above",
        captures=("gen_nan_weights",),
    ),
    Reaction(
        answer="200, counts, ids or the finish reason disagree, or a stop id stands inside the response",
        outcome=errors.BadResponse,
        then="As above",
        captures=("gen_stop_token_ids", f"{captures.SGLANG_JAX}/gen_aborted"),
    ),
    Reaction(
        answer="200, no weight version, a list, a stream, or no response of `/generate` at all (another engine)",
        outcome=errors.BadResponse,
        then="As above",
        captures=(
            "gen_abort_all_batch",
            "gen_batch2_*",
            "gen_n2_rid_str",
            "gen_aborted_stream",
            "gen_stream*",
            "skip_tok_stream",
            "moe_chat_completions_logprobs",
            f"{captures.SGLANG_JAX}/gen_ids_logprob_*",
            f"{captures.SGLANG_JAX}/gen_n2",
            f"{captures.VLLM}/completions_*",
            f"{captures.VLLM}/gen_*",
            f"{captures.VLLM}/err_unknown_field",
        ),
    ),
    Reaction(
        answer="400, 404, 405, other 4xx; a stream that begins with such an error",
        outcome=errors.RequestRefused,
        then="Stops the run at once, with the server's words; nothing is sent twice",
        captures=(
            "ctl_pause_bad_mode",
            "err_batch_one_bad",
            "err_body_not_object",
            "err_dup_*",
            "err_empty_input_ids",
            "err_ids_float",
            "err_json_schema_grammar_none",
            "err_logprob_start_len_beyond",
            "err_lora_without_flag",
            "err_malformed_json",
            "err_max_new_tokens_negative",
            "err_no_input",
            "err_prompt_*",
            "err_rid_count_mismatch",
            "err_stream_*",
            "err_temperature_*",
            "err_top_?_zero",
            "err_unknown_path",
            "err_unknown_sampling_param_seed",
            "err_wrong_*",
            "gen_hidden_states_flag_off",
            "info_get_load",
            "moe_gen_routed_experts_start_too_big",
            "skip_tok_stop_string",
            "skip_tok_text_prompt",
            "w_get_weights_*",
            "w_t_end_twice",
            "w_update_distributed_unknown_group",
            "w_update_from_tensor_bad_b64",
            "w_update_from_tensor_without_begin",
            f"{captures.SGLANG_JAX}/err_[mpt]*",
            f"{captures.SGLANG_JAX}/info_model_info",
            f"{captures.SGLANG_JAX}/w_update_version",
            f"{captures.VLLM}/err_[bot]*",
            f"{captures.VLLM}/err_unknown_model",
        ),
    ),
    Reaction(
        answer="401, 403",
        outcome=errors.Unauthorized,
        then="In a sample: stops the run. In a refit: leaves the server out. Check which of the two keys is set",
        captures=(
            "auth_generate_admin_key",
            "auth_generate_no_key",
            "auth_generate_wrong_key",
            "auth_model_info_no_key",
            "auth_pause_user_key",
            "auth_unknown_path_no_key",
            f"{captures.VLLM}/inference_v1_generate",
        ),
    ),
    Reaction(
        answer="503, also as the abort of a queued request: the queue is full, or the server starts or drains",
        outcome=errors.ServerBusy,
        then="Waits (`backoff`, doubling) and draws the sample again, on another server if one has room",
        captures=("queue_full_req[2345]", "ctl_health_while_paused_*", "ctl_health_after_sigterm"),
    ),
    Reaction(
        answer="500, 502, 504",
        outcome=errors.ServerFailed,
        then="As for 503",
        captures=(f"{captures.SGLANG_JAX}/err_unknown_sampling_param",),
    ),
    Reaction(
        answer="Connection refused, dropped or silent for too long",
        outcome=errors.ServerGone,
        then="Draws its samples elsewhere. A server that is back may hold its start-up weights: unless label and "
        "checksum prove the current ones, they are pushed before any request. A version that killed it twice is not "
        "sent again. Stops the run when no server comes back within `startup_timeout`",
        captures=(
            "ctl_after_drain",
            "err_empty_text_crash",
            "err_ids_out_of_vocab",
            "w_disk_truncated_file",
            "w_disk_wrong_shape",
            "w_update_from_tensor_garbage_inside_session",
            f"{captures.SGLANG_JAX}/gen_stream",
        ),
    ),
    Reaction(
        answer="`/update_weights_from_disk`: 400, or `success` is not true; `/flush_cache`: 400, requests are running",
        outcome=errors.RefitFailed,
        then="Leaves the server out until there are newer weights; stops the run when all fail",
        captures=(
            "w_update_from_disk_missing",
            "w_update_from_disk_no_body",
            "ctl_flush_cache_busy",
            "ctl_flush_while_paused_in_place",
            f"{captures.SGLANG_JAX}/w_update_from_disk",
            f"{captures.VLLM}/ctl_collective_rpc_reload",
        ),
    ),
    Reaction(
        answer="`/server_info`: another engine, a release before 0.5.23, options that change what is sampled",
        outcome=errors.Unsupported,
        then="Leaves the server out; stops the run when none is left",
        captures=(f"{captures.SGLANG_JAX}/info_get_server_info", f"{captures.VLLM}/info_server_info"),
    ),
    Reaction(
        answer="`/ready`: 200",
        outcome="true",
        then="Sends requests",
        captures=("auth_ready_no_key", "ctl_ready_after_continue", "info_ready"),
    ),
    Reaction(
        answer="`/ready`: anything else",
        outcome="false",
        then="Undoes a pause that somebody left behind and asks again; the server stays out meanwhile",
        captures=("ctl_ready_after_sigterm", "ctl_ready_while_paused"),
    ),
    Reaction(
        answer="200 on any other route",
        outcome="done",
        then="Goes on. A 200 of `/update_weights_from_disk` proves nothing: a checkpoint with missing layers or NaN "
        "gets one too. Hence the checks before it and the checksum and probe after it",
        captures=(
            "auth_flush_admin_key",
            "auth_health_no_key",
            "ctl_abort_*",
            "ctl_continue_*",
            "ctl_flush_cache_get",
            "ctl_flush_cache_idle",
            "ctl_flush_while_paused_abort",
            "ctl_flush_while_paused_retract",
            "ctl_pause_abort",
            "ctl_pause_in_place",
            "ctl_pause_retract",
            "ctl_slow_down_*",
            "ctl_update_version_*",
            "info_alive_at_end",
            "info_get_model_info",
            "info_health*",
            "info_model_info",
            "info_ping",
            "info_server_info",
            "info_v1_*",
            "w_begin_*",
            "w_checksum_*",
            "w_continue*",
            "w_d_*",
            "w_destroy_group",
            "w_disk_extra_tensor",
            "w_disk_good*",
            "w_disk_nan_weights",
            "w_disk_partial_checkpoint",
            "w_end_*",
            "w_init_group_gloo",
            "w_model_info_*",
            "w_pause_*",
            "w_release_*",
            "w_resume_*",
            "w_t_begin",
            "w_t_end",
            "w_update_abort_all",
            "w_update_distributed_gloo",
            "w_update_from_disk_ok",
            "w_update_from_tensor_ok",
            "w_update_midflight_*",
            "w_update_weight_version",
            f"{captures.SGLANG_JAX}/ctl_*",
            f"{captures.SGLANG_JAX}/info_get_model_info",
            f"{captures.SGLANG_JAX}/info_health*",
            f"{captures.SGLANG_JAX}/info_v1_models",
            f"{captures.VLLM}/ctl_is_paused",
            f"{captures.VLLM}/ctl_pause_*",
            f"{captures.VLLM}/ctl_res*",
            f"{captures.VLLM}/info_health",
            f"{captures.VLLM}/info_is_paused",
            f"{captures.VLLM}/info_v1_models",
            f"{captures.VLLM}/info_version",
        ),
    ),
)


STALE = Reaction(
    answer="200, a token of weights that were not pushed: `default` after a restart, or of another run",
    outcome=errors.StaleServer,
    then="Leaves the server out until it has the current weights; draws the sample again elsewhere",
    captures=(
        "gen_across_pause_*", "gen_aborted_nonstream", "gen_ids_logprob_*", "gen_sampled_mask_selected",
        "gen_score_only_max1", "gen_stop_eos_via_bias", "moe_gen_T*", "moe_gen_frequency_penalty",
        "moe_gen_routed_experts", "orig_logprob_T07", "skip_tok_eos",
    ),
)  # fmt: skip
"""The same exchanges as in the first two rows, read by an engine that pushed `step-<n>` and nothing else"""


def table() -> str:
    """The rows as Markdown."""
    words = {
        "sample": "a sample",
        "partial": "a partial sample",
        "done": "done",
        "true": "yes",
        "false": "no",
    }
    lines = ["| What the server answers | Meaning | What the engine does |", "|---|---|---|"]
    for row in (*REACTIONS[:2], STALE, *REACTIONS[2:]):
        name = words[row.outcome] if isinstance(row.outcome, str) else f"`{row.outcome.__name__}`"
        lines.append(f"| {row.answer} | {name} | {row.then} |")
    return "\n".join(lines)


def in_document(text: str) -> str:
    """The table as it stands in the document."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
    print(f"{len(REACTIONS) + 1} rows written to {DOCUMENT.relative_to(ROOT)}")
