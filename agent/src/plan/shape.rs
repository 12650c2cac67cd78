//! The numbers of a model that its memory depends on.

/// The numbers that memory depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelShape {
    /// Width of the stream between layers.
    pub hidden: u64,
    /// Width inside a dense layer's feed-forward part.
    pub intermediate: u64,
    /// The same for what one token passes through: all experts that it is sent to.
    pub active: u64,
    /// Tokens there are.
    pub vocabulary: u64,
    /// Layers of all kinds.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Layers whose cache holds the whole context.
    pub full_layers: u32,
    /// Layers whose cache holds no more than `window` tokens.
    pub windowed_layers: u32,
    /// See `windowed_layers`.
    pub window: u32,
    /// Layers with a state instead of a cache (Mamba, linear attention, convolution).
    pub recurrent_layers: u32,
    /// Elements that latent attention (MLA) keeps of each token and layer, in place of keys and values.
    pub latent: Option<u32>,
}
