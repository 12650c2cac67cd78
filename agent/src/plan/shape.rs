//! Numbers of a model that determine its memory.

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelShape {
    /// Width of the stream between layers.
    pub hidden: u64,
    /// Width inside a dense layer's feed-forward part.
    pub intermediate: u64,
    /// Feed-forward width that one token passes through, over all experts that it is routed to.
    pub active: u64,
    /// Size of the vocabulary.
    pub vocabulary: u64,
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Layers whose cache holds the whole context.
    pub full_layers: u32,
    /// Layers whose cache holds no more than `window` tokens.
    pub windowed_layers: u32,
    /// Tokens in the window; see `windowed_layers`.
    pub window: u32,
    /// Layers with a state instead of a cache (Mamba, linear attention, convolution).
    pub recurrent_layers: u32,
    /// Elements that latent attention (MLA) keeps of each token and layer, in place of keys and
    /// values.
    pub latent: Option<u32>,
}
