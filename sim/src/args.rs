//! Command line of the simulated engine: the flags of `vllm serve` that an agent passes, and
//! `--sim-*` flags that only a simulation has.
//!
//! Flags without effect here are accepted and ignored, as in the real engine.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::cross_origin::AllowedOrigins;
use crate::scheduler::Step;

/// Arguments of one simulated engine.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineArgs {
    /// Model name; nothing is loaded, unless `--sim-read-model` has its folder read.
    #[arg(default_value = "sim")]
    pub model: String,
    /// Listen on this Unix socket instead of a port.
    #[arg(long)]
    pub uds: Option<PathBuf>,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 lets the system choose.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Names that requests may use for the model; the first one is used in answers.
    #[arg(long, num_args = 1.., value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Key that requests below `/v1` must carry.
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// KV event publisher, as vLLM's JSON object.
    #[arg(long, value_name = "JSON")]
    pub kv_events_config: Option<String>,
    /// Most tokens of a prompt and its answer; default: 16384, or the cache if smaller.
    #[arg(long)]
    pub max_model_len: Option<usize>,
    /// Most sequences in one step.
    #[arg(long, default_value_t = 256)]
    pub max_num_seqs: usize,
    /// Most tokens computed in one step.
    #[arg(long, default_value_t = 8192)]
    pub max_num_batched_tokens: usize,
    /// Decides the text of answers, with the model name and the prompt.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Tokens in one KV block.
    #[arg(long, default_value_t = 16)]
    pub block_size: usize,
    /// KV blocks of the cache; like vLLM's, one of them is never used.
    #[arg(long, default_value_t = 4096)]
    pub num_gpu_blocks_override: usize,
    /// Seconds that streams in flight may still take after SIGTERM.
    #[arg(long, default_value_t = 0)]
    pub shutdown_timeout: u64,
    /// Answer 503 to requests beyond this number waiting or running.
    #[arg(long)]
    pub max_num_queued_reqs: Option<usize>,
    /// Tokens in one streamed event; the first token is always sent alone.
    #[arg(long, default_value_t = 1)]
    pub stream_interval: usize,
    /// Count the requests in flight for `/load`.
    #[arg(long)]
    pub enable_server_load_tracking: bool,
    /// Report cached prompt tokens in `usage`.
    #[arg(long)]
    pub enable_prompt_tokens_details: bool,
    /// Let web pages of these origins read answers, a list in JSON.
    #[arg(long)]
    pub allowed_origins: Option<AllowedOrigins>,
    /// Return `x-request-id` with every answer.
    #[arg(long)]
    pub enable_request_id_headers: bool,
    /// Let the model decide whether it calls a tool.
    #[arg(long)]
    pub enable_auto_tool_choice: bool,
    /// Take requests with tools; the name is ignored.
    #[arg(long, value_name = "NAME")]
    pub tool_call_parser: Option<String>,
    /// Accepted and ignored: the model does not reason.
    #[arg(long, value_name = "NAME")]
    pub reasoning_parser: Option<String>,
    /// Accepted and ignored.
    #[arg(long)]
    pub disable_uvicorn_access_log: bool,
    /// Have the routes that render prompts.
    #[arg(long)]
    pub enable_scale_out: bool,
    /// Accepted and ignored: agents do not share the tokenizer of another mode than `hf`.
    #[arg(long, value_name = "MODE")]
    pub tokenizer_mode: Option<String>,
    /// Accepted and ignored: what makes an engine sleep are routes of the development mode.
    #[arg(long)]
    pub enable_sleep_mode: bool,
    /// Take LoRA adapters.
    #[arg(long)]
    pub enable_lora: bool,
    /// Nodes over which the engine is spread.
    #[arg(long, default_value_t = 1)]
    pub nnodes: u32,
    /// This node's number among them; the head is 0.
    #[arg(long, default_value_t = 0)]
    pub node_rank: u32,
    /// Address of the head, for the other nodes.
    #[arg(long, default_value = "127.0.0.1")]
    pub master_addr: String,
    /// Port of the head, for the other nodes.
    #[arg(long, default_value_t = 29501)]
    pub master_port: u16,
    /// Serve nothing: this is the part of another node.
    #[arg(long)]
    pub headless: bool,
    /// Accepted and ignored.
    #[arg(long, default_value_t = 1)]
    pub tensor_parallel_size: u32,
    /// Accepted and ignored.
    #[arg(long, default_value_t = 1)]
    pub pipeline_parallel_size: u32,
    /// Have the routes of vLLM's development mode: sleep, wake, weights.
    #[arg(long, env = "VLLM_SERVER_DEV_MODE", hide_env = true, value_parser = clap::builder::FalseyValueParser::new())]
    pub sim_dev_mode: bool,
    /// Have the routes that load and unload LoRA adapters.
    #[arg(long, env = "VLLM_ALLOW_RUNTIME_LORA_UPDATING", hide_env = true, value_parser = clap::builder::FalseyValueParser::new())]
    pub sim_runtime_lora: bool,

    /// Lack the routes that vLLM's Rust front-end lacks, and stream as it does.
    #[arg(long, env = "VLLM_USE_RUST_FRONTEND", hide_env = true, value_parser = clap::builder::FalseyValueParser::new())]
    pub sim_rust_front_end: bool,
    /// Keep the responses that are given, as `/v1/responses` wants it.
    #[arg(long, env = "VLLM_ENABLE_RESPONSES_API_STORE", hide_env = true, value_parser = clap::builder::FalseyValueParser::new())]
    pub sim_store_responses: bool,

    /// Shortest time of a step, in milliseconds.
    #[arg(long, default_value_t = 10.0)]
    pub sim_step_ms: f64,
    /// Time that each prompt token computed adds to a step, in microseconds.
    #[arg(long, default_value_t = 20.0)]
    pub sim_prefill_us: f64,
    /// Time that each generating sequence adds to a step, in microseconds.
    #[arg(long, default_value_t = 10.0)]
    pub sim_decode_us: f64,
    /// KV blocks of copies in the host's memory, as vLLM's OffloadingConnector keeps them; default:
    /// none.
    #[arg(long, default_value_t = 0)]
    pub sim_host_blocks: usize,
    /// Time that each prompt token loaded from there adds to a step, in microseconds.
    #[arg(long, default_value_t = 4.0)]
    pub sim_load_us: f64,
    /// Time from start to ready, in milliseconds.
    #[arg(long, default_value_t = 300)]
    pub sim_start_ms: u64,
    /// Tokens of an answer whose request sets no limit.
    #[arg(long, default_value_t = 64)]
    pub sim_output_tokens: usize,
    /// Die this many milliseconds after becoming ready.
    #[arg(long)]
    pub sim_die_after_ms: Option<u64>,
    /// Die when a request's body contains this text.
    #[arg(long, value_name = "TEXT")]
    pub sim_die_on: Option<String>,
    /// Milliseconds from such a request to the death, in which its answer and others may begin.
    #[arg(long, default_value_t = 0)]
    pub sim_die_on_ms: u64,
    /// Answer 500 when a request's body contains this text, as vLLM does to a grammar that it
    /// cannot compile.
    #[arg(long, value_name = "TEXT")]
    pub sim_err_on: Option<String>,
    /// Call the first tool where the request leaves the choice to the model, unless the last
    /// message is a tool's result.
    #[arg(long)]
    pub sim_call_tools: bool,
    /// Read all files of the model's folder while starting, as an engine with weights does.
    #[arg(long)]
    pub sim_read_model: bool,
    /// Fail while starting, with a Python traceback in the log.
    #[arg(long)]
    pub sim_fail_start: bool,
}

/// Exists so that the defaults have one source, the attributes above.
#[derive(Parser)]
struct Alone {
    #[command(flatten)]
    args: EngineArgs,
}

impl Default for EngineArgs {
    fn default() -> Self {
        Self::from_flags::<&str>(&[])
    }
}

impl EngineArgs {
    /// Parses flags as the command line would.
    ///
    /// For tests and embedded engines, whose flags are written in code.
    ///
    /// # Panics
    /// On flags that the command line would refuse.
    #[must_use]
    pub fn from_flags<S: AsRef<str>>(flags: &[S]) -> Self {
        let words = std::iter::once("engine").chain(flags.iter().map(AsRef::as_ref));
        Alone::try_parse_from(words).expect("flags written in code are valid").args
    }

    /// Name used in answers and metric labels.
    #[must_use]
    pub fn served_name(&self) -> &str {
        self.served_model_name.first().unwrap_or(&self.model)
    }

    pub(crate) fn served_names(&self) -> Vec<String> {
        if self.served_model_name.is_empty() { vec![self.model.clone()] } else { self.served_model_name.clone() }
    }

    /// Tokens that the whole cache holds; block 0 is never handed out, as in vLLM.
    pub(crate) fn cache_tokens(&self) -> usize {
        self.num_gpu_blocks_override.saturating_sub(1) * self.block_size
    }

    pub(crate) fn context_length(&self) -> usize {
        self.max_model_len.unwrap_or_else(|| self.cache_tokens().min(16_384))
    }

    /// Time of a step with this much work, before any fault slows it.
    pub(crate) fn step_time(&self, Step { prefill_tokens, loaded_tokens, decodes }: Step) -> Duration {
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
        let [prefill, load, decode] =
            [self.sim_prefill_us * prefill_tokens as f64, self.sim_load_us * loaded_tokens as f64, self.sim_decode_us * decodes as f64];
        let micros = self.sim_step_ms * 1000.0 + prefill + load + decode;
        Duration::from_secs_f64(micros.max(0.0) / 1e6)
    }
}
