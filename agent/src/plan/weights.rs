//! Bytes of a model's weights: its parameters counted from its shapes, and the formats in which
//! they are kept.
//!
//! Arithmetic only.

use serde_json::Value;

use super::shape::ModelShape;
use super::stage::PipelineStage;
use crate::sizes::scaled;
use crate::vllm::arguments::value_of;

/// Bits of a parameter in the four-bit formats with their scales: a 16-bit scale and a zero point
/// for each group of 128.
const FOUR_BIT_BITS: f64 = 4.25;

/// Largest number of a `config.json` that is believed, other than a context: the largest vocabulary
/// is a sixtieth of it. Products of five such numbers fit 128 bits.
const MAX_NUMBER: u64 = 1 << 24;

/// Most parameters of a model that is believed to be one, a hundred times the largest.
const MAX_PARAMETERS: u64 = 1 << 48;

/// First of these numbers in a `config.json`, unless it is absurd.
pub(super) fn find_number(config: &Value, names: &[&str]) -> Option<u64> {
    names.iter().find_map(|name| config.get(*name)?.as_u64()).filter(|number| *number <= MAX_NUMBER)
}

/// A model's parameters, by whether quantization applies to them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ParameterCounts {
    /// Token embeddings and output head, which keep 16 bits.
    pub(super) embeddings: u64,
    pub(super) attention: u64,
    /// Feed-forward parts of all layers, all experts included.
    pub(super) feed_forward: u64,
    /// Whether the output head is the table of token embeddings.
    pub(super) is_tied: bool,
    /// First layers of a model with experts that have none.
    pub(super) dense_layers: u32,
    /// Parameters of these layers.
    pub(super) dense: u64,
}

impl ParameterCounts {
    pub(super) fn total(self) -> u64 {
        self.embeddings + self.attention + self.feed_forward
    }

    /// Parameters of the token embeddings, and of the output head.
    pub(super) fn table(self) -> u64 {
        if self.is_tied { self.embeddings } else { self.embeddings / 2 }
    }

    /// Part of `bytes`, which all layers take, that the layers of a stage take.
    pub(super) fn layer_bytes(self, bytes: u64, stage: &PipelineStage, layers: u32) -> u64 {
        let all = u128::from(self.attention) + u128::from(self.feed_forward);
        let dense = u128::from(self.dense).min(all);
        let in_dense = stage.layers_among_first(self.dense_layers);
        let share = |parameters: u128, part: u32, of: u32| parameters * u128::from(part) / u128::from(of.max(1));
        let in_stage = share(dense, in_dense, self.dense_layers)
            + share(all - dense, stage.layers - in_dense, layers.saturating_sub(self.dense_layers));
        let part = u128::from(bytes).saturating_mul(in_stage).div_ceil(all.max(1));
        u64::try_from(part).unwrap_or(u64::MAX)
    }
}

/// Format of weights in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightFormat {
    /// Name of the format: `bf16`, `fp8`, `awq`…
    pub name: String,
    /// Bytes of an unquantized parameter in memory.
    pub plain_bytes: u64,
    /// Bytes of an unquantized parameter on disk.
    stored_bytes: u64,
    /// Bits of a quantized parameter; `None` if nothing is quantized.
    bits: Option<f64>,
    /// Whether only the feed-forward part is quantized, as in `mxfp4` checkpoints.
    experts_only: bool,
    /// Whether the engine quantizes while it loads.
    online: bool,
}

impl WeightFormat {
    /// Format of a checkpoint, from its `config.json` and the engine's arguments.
    pub(super) fn of(config: &Value, text: &Value, arguments: &[String]) -> Self {
        let named = |value: &Value| ["dtype", "torch_dtype"].iter().find_map(|name| value.get(*name)?.as_str().map(str::to_owned));
        let stored = named(text).or_else(|| named(config)).unwrap_or_else(|| "bfloat16".to_owned());
        let stored_bytes = type_bytes(&stored);
        let given = value_of(arguments, "--dtype").filter(|given| *given != "auto");
        // By default the engine loads 32-bit checkpoints as 16-bit ones.
        let plain_bytes = given.map_or(stored_bytes.min(2), type_bytes);
        let plain = match given.unwrap_or(&stored) {
            "float16" | "half" => "fp16",
            "float32" | "float" if plain_bytes == 4 => "fp32",
            _ => "bf16",
        };
        let kept = Self { name: plain.to_owned(), plain_bytes, stored_bytes, bits: None, experts_only: false, online: false };
        let quantization =
            config.get("quantization_config").or_else(|| text.get("quantization_config")).or_else(|| config.get("compression_config"));
        if let Some((name, bits)) = quantization.and_then(parse_quantization) {
            return Self { experts_only: name == "mxfp4", name, bits: Some(bits), ..kept };
        }
        match value_of(arguments, "--quantization").or_else(|| value_of(arguments, "-q")) {
            Some(name) if name.starts_with("fp8") || name.contains("int8") => {
                Self { name: name.to_owned(), bits: Some(8.0), online: true, ..kept }
            }
            Some(name @ "bitsandbytes") => Self { name: name.to_owned(), bits: Some(FOUR_BIT_BITS), online: true, ..kept },
            _ => kept,
        }
    }

    /// Whether every parameter has the width of the model's type, on disk and in memory.
    pub(super) fn is_plain(&self) -> bool {
        self.bits.is_none() || self.online
    }

    #[must_use]
    pub fn is_unquantized(&self) -> bool {
        self.bits.is_none()
    }

    pub(super) fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Memory that this many bytes on disk take.
    pub(super) fn loaded_bytes(&self, on_disk: u64, parameters: &ParameterCounts) -> u64 {
        match self.bits {
            Some(_) if self.online => self.bytes_of(parameters),
            Some(_) => on_disk,
            None => on_disk / self.stored_bytes * self.plain_bytes,
        }
    }

    /// Memory for parameters that are nowhere on disk.
    pub(super) fn bytes_of(&self, parameters: &ParameterCounts) -> u64 {
        let Some(bits) = self.bits else { return parameters.total() * self.plain_bytes };
        let kept = parameters.embeddings + if self.experts_only { parameters.attention } else { 0 };
        kept * self.plain_bytes + scaled(parameters.total() - kept, bits / 8.0)
    }
}

/// Sizes of the weights in the two usual formats for a model that does not fit: one byte a
/// parameter, and four bits.
pub(super) fn quantized_sizes(parameters: u64) -> [(&'static str, u64); 2] {
    [("fp8", parameters), ("4-bit (AWQ or GPTQ)", scaled(parameters, FOUR_BIT_BITS / 8.0))]
}

fn type_bytes(name: &str) -> u64 {
    match name {
        "float32" | "float" => 4,
        "float8_e4m3fn" | "float8_e5m2" => 1,
        _ => 2,
    }
}

/// Name and bits of a checkpoint's quantization.
fn parse_quantization(config: &Value) -> Option<(String, f64)> {
    let text = |name: &str| config.get(name).and_then(Value::as_str);
    let bits = ["bits", "w_bit", "weight_bits"].iter().find_map(|name| config.get(*name)?.as_f64());
    let method = text("quant_method")?.to_lowercase();
    let bits = match method.as_str() {
        "fp8" | "fbgemm_fp8" | "ptpc_fp8" | "experts_int8" => 8.0,
        "mxfp4" => FOUR_BIT_BITS,
        "bitsandbytes" if config.get("load_in_8bit").and_then(Value::as_bool) == Some(true) => 8.0,
        "compressed-tensors" => parse_compressed_bits(config).unwrap_or(8.0),
        "modelopt" | "modelopt_fp4" if text("quant_algo").is_some_and(|name| name.contains("FP4")) => 4.5,
        "modelopt" => 8.0,
        // Each group of four-bit weights has scales and zero points; eight bits hardly have any.
        _ => bits.map_or(FOUR_BIT_BITS, |bits| if bits < 8.0 { bits + 0.25 } else { bits }),
    };
    Some((method, bits))
}

/// Widest weights of a `compressed-tensors` checkpoint.
fn parse_compressed_bits(config: &Value) -> Option<f64> {
    let groups = config.get("config_groups")?.as_object()?;
    groups.values().filter_map(|group| group.get("weights")?.get("num_bits")?.as_f64()).reduce(f64::max)
}

/// Counts parameters from shapes. Norms and biases are left out: less than one in a thousand.
///
/// `None` if no model has so many.
pub(super) fn count_parameters(config: &Value, shape: &ModelShape) -> Option<ParameterCounts> {
    let number = |names: &[&str]| find_number(config, names).map(u128::from);
    // Gemma's configurations do not say that their embeddings are tied. Others count as not tied,
    // on the safe side.
    let gemma = || config.get("model_type").and_then(Value::as_str).is_some_and(|kind| kind.starts_with("gemma"));
    let tied = config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or_else(gemma);
    let (layers, hidden, intermediate) = (u128::from(shape.layers), u128::from(shape.hidden), u128::from(shape.intermediate));
    let experts = number(&["num_local_experts", "n_routed_experts", "num_experts"]).unwrap_or(0);
    let attention = count_attention(config, shape);
    // Gate, up and down. Old models have no gate; their result is half too large, on the safe side.
    let gated = |width: u128| 3 * hidden * width;
    let dense_layers = number(&["first_k_dense_replace"]).filter(|_| experts > 0).unwrap_or(0).min(layers);
    let feed_forward = if experts == 0 {
        layers * gated(intermediate)
    } else {
        let width = number(&["moe_intermediate_size"]).unwrap_or(intermediate);
        let shared = number(&["shared_expert_intermediate_size"]).or_else(|| Some(number(&["n_shared_experts"])? * width)).unwrap_or(0);
        let every = number(&["decoder_sparse_step", "moe_layer_freq"]).unwrap_or(1).max(1);
        let sparse = (layers - dense_layers) / every;
        sparse * (experts * gated(width) + gated(shared) + hidden * experts) + (layers - sparse) * gated(intermediate)
    };
    let believed = |parameters: u128| u64::try_from(parameters).ok().filter(|parameters| *parameters <= MAX_PARAMETERS);
    Some(ParameterCounts {
        embeddings: believed(u128::from(shape.vocabulary) * hidden * if tied { 1 } else { 2 })?,
        attention: believed(layers * attention)?,
        feed_forward: believed(feed_forward)?,
        is_tied: tied,
        dense_layers: u32::try_from(dense_layers).ok()?,
        dense: believed(dense_layers * (attention + gated(intermediate)))?,
    })
}

/// Attention of one layer.
///
/// A layer with a state in place of attention is counted alike; its parameters are of the same
/// order.
fn count_attention(config: &Value, shape: &ModelShape) -> u128 {
    let number = |name: &str| find_number(config, &[name]).map(u128::from);
    let (heads, hidden) = (u128::from(shape.heads), u128::from(shape.hidden));
    if let Some(rank) = number("kv_lora_rank") {
        let (nope, rope) = (number("qk_nope_head_dim").unwrap_or(128), number("qk_rope_head_dim").unwrap_or(64));
        let value = number("v_head_dim").unwrap_or(128);
        let query = match number("q_lora_rank") {
            Some(query_rank) => hidden * query_rank + query_rank * heads * (nope + rope),
            None => hidden * heads * (nope + rope),
        };
        return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden;
    }
    let head = u128::from(shape.head_dim);
    2 * hidden * heads * head + 2 * hidden * u128::from(shape.kv_heads) * head
}
