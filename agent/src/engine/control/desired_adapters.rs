//! Adapters that the engine should have in each of its lives.
//!
//! The control task writes them; every reader of the engine's models respects them.

use std::path::Path;
use std::sync::Arc;

use super::{LoraAdapter, routes};
use crate::engine::model_card::ModelCard;
use crate::engine_client::ApiClient;

/// Adapters to keep loaded and hide for readers of the engine's models.
///
/// A change means that the models must be read again now.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct DesiredAdapters {
    /// Adapters loaded in every life.
    pub(in crate::engine) adapters: Arc<[LoraAdapter]>,
    /// Adapter about to be unloaded, so no longer reported.
    pub(in crate::engine) unloading: Option<String>,
}

impl DesiredAdapters {
    /// Filters the models that the engine names down to those to report.
    pub(in crate::engine) fn visible_models(&self, mut models: Vec<ModelCard>) -> Vec<ModelCard> {
        models.retain(|model| self.unloading.as_ref() != Some(&model.id));
        models
    }

    pub(in crate::engine) fn missing_adapters(&self, models: &[ModelCard]) -> impl Iterator<Item = &LoraAdapter> {
        let kept = self.adapters.iter().filter(|adapter| self.unloading.as_ref() != Some(&adapter.name));
        kept.filter(|adapter| models.iter().all(|model| model.id != adapter.name))
    }

    /// Loads the adapters that this life lacks.
    ///
    /// An adapter that cannot be loaded is logged and stays a finding, because the model itself can
    /// still serve.
    pub(in crate::engine) async fn restore(&self, socket: &Path, models: &[ModelCard]) {
        let client = ApiClient::new(socket);
        for adapter in self.missing_adapters(models) {
            match routes::load(&client, adapter).await {
                Ok(()) => tracing::info!(name = adapter.name, "LoRA adapter loaded again"),
                Err(error) => tracing::error!(name = adapter.name, path = adapter.path, %error, "LoRA adapter is not loaded again"),
            }
        }
    }
}
