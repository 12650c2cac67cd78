//! Size and shape of a model, from its own folder: `config.json`, the index of its weights and the
//! sizes of their files.
//!
//! Only reads the disk; `plan` calls it once, before the first engine starts.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::shape::ModelShape;
use super::stage::PipelineStage;
use super::weights::{self, ParameterCounts, WeightFormat};
use crate::prompt_files;
use crate::sizes::scaled;
use crate::vllm::arguments::value_of;

/// Largest size of weights that is believed, a hundred times the largest models'.
const MAX_WEIGHT_BYTES: u64 = 1 << 50;

/// Knowledge of the model to be served.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelInfo {
    Known(Box<ModelFacts>),
    /// Nothing is known, for this reason; one GPU per replica is then assumed.
    Unknown {
        /// Reason, which ends a sentence.
        because: String,
    },
}

impl ModelInfo {
    #[must_use]
    pub fn facts(&self) -> Option<&ModelFacts> {
        match self {
            Self::Known(facts) => Some(facts),
            Self::Unknown { .. } => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// Class that implements the model, such as `LlamaForCausalLM`; empty if none is named.
    pub architecture: String,
    /// Number of all parameters.
    pub parameters: u64,
    /// Memory of the weights, over all GPUs of a replica.
    pub weight_bytes: u64,
    pub size_source: WeightSizeSource,
    /// Format of the weights.
    pub format: WeightFormat,
    /// Layers and their widths.
    pub shape: ModelShape,
    /// Longest context that the model was made for.
    pub context: u32,
    /// Parameters by their shapes.
    pub(super) counts: ParameterCounts,
}

/// Source of the weights' size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightSizeSource {
    Index,
    Files,
    /// Shapes in `config.json`, because there are no weight files.
    Shapes,
}

impl ModelFacts {
    /// Whether the model generates text, as far as its class tells.
    #[must_use]
    pub fn is_generative(&self) -> bool {
        let ends = ["ForCausalLM", "ForConditionalGeneration", "LMHeadModel"];
        self.architecture.is_empty() || ends.iter().any(|end| self.architecture.ends_with(end))
    }

    /// Memory of the weights of a stage, over all GPUs that share its layers.
    ///
    /// The first stage has the token embeddings and the last one the output head. Where both are
    /// one table, vLLM loads it at both ends.
    pub(super) fn stage_bytes(&self, stage: &PipelineStage) -> u64 {
        if stage.of <= 1 {
            return self.weight_bytes;
        }
        let tables = if self.counts.is_tied { 1 } else { 2 };
        let table = self.counts.table().saturating_mul(self.format.plain_bytes).min(self.weight_bytes / tables);
        let layers = self.counts.layer_bytes(self.weight_bytes - table * tables, stage, self.shape.layers);
        layers + table * (u64::from(stage.is_first()) + u64::from(stage.is_last()))
    }

    /// Reads a model's folder, or its place in the cache of downloaded ones.
    ///
    /// `arguments` are the engine's, because some change what is loaded.
    #[must_use]
    pub fn read(model: &str, arguments: &[String], downloads: &Path) -> ModelInfo {
        let revision = value_of(arguments, "--revision");
        let Some(folder) = prompt_files::resolve_folder(model, revision, downloads) else {
            let because = format!(
                "it is neither a folder nor downloaded to {}, so nothing can be computed: `hf download {model} config.json` first, or decide with --tp",
                downloads.display()
            );
            return ModelInfo::Unknown { because };
        };
        match Self::read_folder(&folder, arguments) {
            Ok(facts) => ModelInfo::Known(Box::new(facts)),
            Err(because) => ModelInfo::Unknown { because },
        }
    }

    fn read_folder(folder: &Path, arguments: &[String]) -> Result<Self, String> {
        let path = folder.join("config.json");
        let text = fs::read_to_string(&path).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        let config: Value = serde_json::from_str(&text).map_err(|error| format!("{} is not JSON: {error}", path.display()))?;
        let on_disk = weight_files(folder);
        Self::from_config(&config, on_disk, arguments).ok_or_else(|| format!("{} does not name the model's shapes", path.display()))
    }

    /// Extracts the facts of a `config.json`, with the size of the weights on disk if there are
    /// any.
    ///
    /// `None` if required values are missing.
    pub(super) fn from_config(config: &Value, on_disk: Option<(u64, WeightSizeSource)>, arguments: &[String]) -> Option<Self> {
        // Models with vision or audio keep their language model's shapes one level down.
        let nested =
            ["text_config", "llm_config", "language_config"].iter().find_map(|name| config.get(*name).filter(|part| part.is_object()));
        let text = TextConfig(nested.unwrap_or(config));
        let shape = text.shape()?;
        let format = WeightFormat::of(config, text.0, arguments);
        let by_shape = weights::count_parameters(text.0, &shape)?;
        let (weight_bytes, parameters, measured) = match on_disk {
            Some((bytes, measured)) => {
                // The bytes of an unquantized model give its number of parameters, whatever the
                // model is.
                let parameters = if format.is_plain() { bytes / format.stored_bytes() } else { by_shape.total() };
                (format.loaded_bytes(bytes, &by_shape), parameters, measured)
            }
            None => (format.bytes_of(&by_shape), by_shape.total(), WeightSizeSource::Shapes),
        };
        let architecture = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str).unwrap_or_default();
        Some(Self {
            architecture: architecture.to_owned(),
            parameters,
            weight_bytes,
            size_source: measured,
            format,
            context: text.context(),
            shape,
            counts: by_shape,
        })
    }
}

/// Part of a `config.json` that describes the language model.
struct TextConfig<'a>(&'a Value);

impl TextConfig<'_> {
    fn number(&self, names: &[&str]) -> Option<u64> {
        weights::find_number(self.0, names)
    }

    fn number_u32(&self, names: &[&str]) -> Option<u32> {
        u32::try_from(self.number(names)?).ok()
    }

    /// A number of tokens, which may be larger than others.
    fn tokens(&self, names: &[&str]) -> Option<u32> {
        names.iter().find_map(|name| self.0.get(*name)?.as_u64()).and_then(|tokens| u32::try_from(tokens).ok())
    }

    fn shape(&self) -> Option<ModelShape> {
        let hidden = self.number(&["hidden_size", "n_embd", "d_model"])?;
        let layers = self.number_u32(&["num_hidden_layers", "n_layer", "num_layers", "n_layers"])?;
        let heads = self.number_u32(&["num_attention_heads", "n_head", "n_heads"])?.max(1);
        let kv_heads = self.number_u32(&["num_key_value_heads", "num_kv_heads", "multi_query_group_num"]).unwrap_or(heads).max(1);
        let head_dim = self.number_u32(&["head_dim", "attention_head_dim"]).or_else(|| u32::try_from(hidden / u64::from(heads)).ok())?;
        let (full_layers, windowed_layers, recurrent_layers) = self.layer_kinds(layers);
        let intermediate = self.number(&["intermediate_size", "n_inner", "ffn_dim"]).unwrap_or(4 * hidden);
        let chosen = self.number(&["num_experts_per_tok", "num_experts_per_token", "moe_topk"]).unwrap_or(0);
        Some(ModelShape {
            hidden,
            intermediate,
            active: intermediate.max(chosen * self.number(&["moe_intermediate_size"]).unwrap_or(intermediate)),
            vocabulary: self.number(&["vocab_size"])?,
            layers,
            heads,
            kv_heads,
            head_dim,
            full_layers,
            windowed_layers,
            window: self.number_u32(&["sliding_window"]).unwrap_or(0),
            recurrent_layers,
            latent: self.number_u32(&["kv_lora_rank"]).map(|rank| rank + self.number_u32(&["qk_rope_head_dim"]).unwrap_or(0)),
        })
    }

    /// Numbers of layers that keep all tokens, a window of them, or a state.
    fn layer_kinds(&self, layers: u32) -> (u32, u32, u32) {
        let window = self.number_u32(&["sliding_window"]).filter(|window| *window > 0);
        let window = window.filter(|_| self.0.get("use_sliding_window").and_then(Value::as_bool) != Some(false));
        if let Some(kinds) = self.0.get("layer_types").or_else(|| self.0.get("layers_block_type")).and_then(Value::as_array) {
            let count = |test: fn(&str) -> bool| {
                u32::try_from(kinds.iter().filter_map(Value::as_str).filter(|kind| test(kind)).count()).unwrap_or(layers)
            };
            let windowed = count(|kind| kind.contains("sliding") || kind.contains("chunked"));
            let recurrent = count(|kind| kind.contains("mamba") || kind.contains("linear") || kind.contains("conv") || kind == "recurrent");
            return match window {
                Some(_) => (layers.saturating_sub(windowed + recurrent), windowed, recurrent),
                None => (layers.saturating_sub(recurrent), 0, recurrent),
            };
        }
        if let Some(pattern) = self.0.get("hybrid_override_pattern").and_then(Value::as_str) {
            let attention = u32::try_from(pattern.chars().filter(|kind| *kind == '*').count()).unwrap_or(layers).min(layers);
            return (attention, 0, layers - attention);
        }
        if let Some(period) = self.number_u32(&["full_attention_interval", "attn_layer_period"]).filter(|period| *period > 0) {
            let attention = (layers / period).max(1);
            return (attention, 0, layers.saturating_sub(attention));
        }
        if let Some(indices) = self.0.get("attn_layer_indices").and_then(Value::as_array) {
            let attention = u32::try_from(indices.len()).unwrap_or(layers).min(layers);
            return (attention, 0, layers - attention);
        }
        match (window, self.number_u32(&["sliding_window_pattern"]).filter(|pattern| *pattern > 0)) {
            (Some(_), Some(pattern)) => (layers / pattern, layers - layers / pattern, 0),
            // Before configurations listed layer types, Gemma 2 had them only in its code.
            (Some(_), None) if self.0.get("model_type").and_then(Value::as_str) == Some("gemma2") => (layers / 2, layers - layers / 2, 0),
            (Some(_), None) => (0, layers, 0),
            (None, _) => (layers, 0, 0),
        }
    }

    /// Context as vLLM derives it: the length that the model was trained for, times a scaling of
    /// its positions unless the number includes it.
    ///
    /// A tokenizer's limit is ignored.
    fn context(&self) -> u32 {
        let names = ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length"];
        let made_for = self.tokens(&names).unwrap_or(2_048);
        let scaling = self.0.get("rope_scaling").filter(|scaling| scaling.is_object()).or_else(|| self.0.get("rope_parameters"));
        let kind = scaling.and_then(|scaling| scaling.get("rope_type").or_else(|| scaling.get("type"))).and_then(Value::as_str);
        match kind {
            Some("longrope") => self.tokens(&["original_max_position_embeddings"]).unwrap_or(made_for),
            // For Gemma 3 the number already includes the scaling.
            Some("linear" | "dynamic") if !self.0.get("model_type").and_then(Value::as_str).is_some_and(|kind| kind.contains("gemma3")) => {
                let factor = scaling.and_then(|scaling| scaling.get("factor")?.as_f64()).unwrap_or(1.0);
                u32::try_from(scaled(u64::from(made_for), factor)).unwrap_or(u32::MAX)
            }
            _ => made_for,
        }
    }
}

/// Bytes of the weights in a folder, from their index or else from the sizes of the files that the
/// engine would load.
fn weight_files(folder: &Path) -> Option<(u64, WeightSizeSource)> {
    for index in ["model.safetensors.index.json", "pytorch_model.bin.index.json"] {
        let text = fs::read_to_string(folder.join(index)).ok();
        let total = text.and_then(|text| serde_json::from_str::<Value>(&text).ok()?.get("metadata")?.get("total_size")?.as_u64());
        if let Some(total) = total.filter(|total| (1..=MAX_WEIGHT_BYTES).contains(total)) {
            return Some((total, WeightSizeSource::Index));
        }
    }
    let entries: Vec<PathBuf> = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let sum = |prefix: &str, suffix: &str| -> u64 {
        let named = |path: &&PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| {
                // Mistral keeps its own copy of the same weights beside the others.
                name.starts_with(prefix) && name.ends_with(suffix) && (!name.starts_with("consolidated") || prefix == "consolidated")
            })
        };
        entries.iter().filter(named).filter_map(|path| Some(fs::metadata(path).ok()?.len())).fold(0, u64::saturating_add)
    };
    let sums = [("", ".safetensors"), ("consolidated", ".safetensors"), ("pytorch_model", ".bin"), ("", ".pt")];
    let bytes = sums.iter().map(|(prefix, suffix)| sum(prefix, suffix)).find(|bytes| (1..=MAX_WEIGHT_BYTES).contains(bytes))?;
    Some((bytes, WeightSizeSource::Files))
}

#[cfg(test)]
pub(super) mod tests;
