//! The fleet's models in Ollama's terms: its lists, and the names it uses.

use std::time::{Duration, SystemTime};

use http::{Request, Response};
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{json_response, success_response};
use crate::access_log::AccessEntry;
use crate::dispatch::Refusal;
use crate::edge::ollama_translator::format_time;
use crate::edge::reply::{self, EdgeBody};
use crate::fleet::{FleetView, Model};
use crate::inbound::Edge;
use crate::keys::Caller;

/// The version of Ollama whose API this is. Clients compare it with the version they need, so it is
/// not Hostler's.
const API_VERSION: &str = "0.12.11";

/// The expiry of a model that is never unloaded, in a form that every client can parse.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The suffix that Ollama's clients add to a name without a tag.
const LATEST_TAG: &str = ":latest";

/// `/api/version`.
pub(super) fn version() -> Value {
    json!({"version": API_VERSION, "hostler": env!("CARGO_PKG_VERSION")})
}

#[derive(Debug, Default, Deserialize)]
struct CatalogCard {
    created: Option<u64>,
    parent: Option<String>,
    max_model_len: Option<u64>,
}

/// The known facts of a model. Ollama's fields for the rest stay empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CatalogModel {
    name: String,
    created: Option<u64>,
    parent: String,
    max_context: Option<u64>,
    quantization: String,
    capabilities: Vec<&'static str>,
    is_ready: bool,
}

impl CatalogModel {
    fn of(view: &FleetView, model: &Model) -> Self {
        let card: CatalogCard = serde_json::from_slice(&model.card).unwrap_or_default();
        let serving = || view.replicas.iter().filter(|replica| replica.serves(Some(&model.id)));
        let launch = serving().find_map(|replica| replica.state.launch.as_ref());
        let flags = EngineFlags(launch.map_or(&[], |launch| &launch.flags));
        Self {
            name: model.id.clone(),
            created: card.created,
            // An adapter's card has no length, but its engine has.
            max_context: card.max_model_len.or(launch.and_then(|launch| launch.max_context_tokens)).filter(|length| *length > 0),
            parent: card.parent.unwrap_or_default(),
            quantization: flags.value("--quantization").unwrap_or_default().to_owned(),
            capabilities: flags.capabilities(),
            is_ready: serving().any(|replica| replica.is_ready()),
        }
    }

    fn modified_at(&self) -> String {
        format_time(SystemTime::UNIX_EPOCH + Duration::from_secs(self.created.unwrap_or(0)))
    }

    fn details(&self) -> Value {
        json!({
            "parent_model": self.parent,
            "format": "",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": self.quantization,
        })
    }

    /// A digest of the name: engines report none of the file, and Ollama's own tools cut it to twelve
    /// characters.
    fn digest(&self) -> String {
        Sha256::digest(&self.name).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// An entry of `/api/tags`.
    pub(super) fn tags_entry(&self) -> Value {
        json!({
            "name": self.name,
            "model": self.name,
            "modified_at": self.modified_at(),
            "size": 0,
            "digest": self.digest(),
            "details": self.details(),
        })
    }

    pub(super) fn ps_entry(&self) -> Value {
        json!({
            "name": self.name,
            "model": self.name,
            "size": 0,
            "digest": self.digest(),
            "details": self.details(),
            "expires_at": NEVER,
            "size_vram": 0,
            "context_length": self.max_context.unwrap_or(0),
        })
    }

    /// The answer to `/api/show`. Clients look for a model's context length only under the name of
    /// its architecture, which engines do not report; the length is under the engine's name.
    pub(super) fn show_answer(&self) -> Value {
        let mut info =
            Map::from_iter([("general.architecture".to_owned(), json!("vllm")), ("general.basename".to_owned(), json!(self.name))]);
        if let Some(longest) = self.max_context {
            info.insert("vllm.context_length".to_owned(), longest.into());
        }
        json!({
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": self.details(),
            "model_info": info,
            "capabilities": self.capabilities,
            "modified_at": self.modified_at(),
        })
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct EngineFlags<'a>(pub(super) &'a [String]);

impl<'a> EngineFlags<'a> {
    /// A flag's value: the next word, or the text behind `=`.
    fn value(self, name: &str) -> Option<&'a str> {
        let behind = |flag: &'a String| flag.strip_prefix(name)?.strip_prefix('=');
        let next = || self.0.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1].as_str());
        self.0.iter().find_map(behind).or_else(next)
    }

    /// A model's capabilities, as far as its engine's flags show them. They do not show whether it
    /// sees images.
    pub(super) fn capabilities(self) -> Vec<&'static str> {
        let pools = self.value("--runner") == Some("pooling") || matches!(self.value("--convert"), Some("embed" | "classify" | "reward"));
        if pools {
            return vec!["embedding"];
        }
        let has = |name: &str| self.0.iter().any(|flag| flag == name);
        let mut capabilities = vec!["completion"];
        capabilities.extend(has("--enable-auto-tool-choice").then_some("tools"));
        capabilities.extend(self.value("--reasoning-parser").map(|_| "thinking"));
        capabilities
    }
}

/// The fleet's own name for the model that a client names.
pub(super) fn resolve<'a>(name: &str, mut known: impl Iterator<Item = &'a str> + Clone) -> String {
    let short = name.strip_suffix(LATEST_TAG);
    let long = format!("{name}{LATEST_TAG}");
    let is_known = |wanted: &str| known.clone().any(|model| model == wanted);
    match short {
        _ if is_known(name) => name.to_owned(),
        Some(short) if is_known(short) => short.to_owned(),
        _ => known.find(|model| *model == long).unwrap_or(name).to_owned(),
    }
}

impl Edge {
    /// `/api/tags`: the models of the whole fleet that this caller may use.
    pub(super) fn list_tags(&self, caller: &Caller) -> Value {
        json!({"models": self.list_catalog(caller).iter().map(CatalogModel::tags_entry).collect::<Vec<_>>()})
    }

    /// `/api/ps`: the models that are served now.
    pub(super) fn list_running(&self, caller: &Caller) -> Value {
        let running = self.list_catalog(caller).into_iter().filter(|known| known.is_ready);
        json!({"models": running.map(|known| known.ps_entry()).collect::<Vec<_>>()})
    }

    /// `/api/show`.
    pub(super) async fn show_ollama_model(
        &self,
        request: Box<Request<Incoming>>,
        caller: &Caller,
        entry: &AccessEntry,
    ) -> Response<EdgeBody> {
        self.answer_about_model(request, caller, entry, |model, _| json_response(&model.show_answer())).await
    }

    /// Answers `/api/pull`: what the fleet serves is there already.
    pub(super) async fn pull_ollama_model(
        &self,
        request: Box<Request<Incoming>>,
        caller: &Caller,
        entry: &AccessEntry,
    ) -> Response<EdgeBody> {
        self.answer_about_model(request, caller, entry, |_, is_stream| success_response(is_stream)).await
    }

    async fn answer_about_model(
        &self,
        request: Box<Request<Incoming>>,
        caller: &Caller,
        entry: &AccessEntry,
        answer: impl FnOnce(&CatalogModel, bool) -> Response<EdgeBody>,
    ) -> Response<EdgeBody> {
        #[derive(Deserialize)]
        struct Named {
            // An older name of the field.
            #[serde(alias = "name")]
            model: String,
            stream: Option<bool>,
        }
        let inbound = match self.read_request(request, caller, entry).await {
            Ok(read) => read,
            Err(unread) => return reply::unread_body(&unread),
        };
        match serde_json::from_slice::<Named>(&inbound.body) {
            Err(error) => self.malformed(entry, &format!("the body cannot be understood: {error}")),
            Ok(Named { model, stream }) => match self.find_model(&model, caller) {
                Ok(known) => answer(&known, stream != Some(false)),
                Err(refusal) => self.refuse(refusal, entry),
            },
        }
    }

    fn list_catalog(&self, caller: &Caller) -> Vec<CatalogModel> {
        let view = self.dispatch.fleet.view();
        let models = view.models().into_iter().filter(|model| caller.may_use(&model.id));
        models.map(|model| CatalogModel::of(&view, model)).collect()
    }

    /// A model by the name that a client gives it.
    pub(super) fn find_model(&self, name: &str, caller: &Caller) -> Result<CatalogModel, Refusal> {
        let mut all = self.list_catalog(caller);
        let wanted = resolve(name, all.iter().map(|known| known.name.as_str()));
        if let Some(at) = all.iter().position(|known| known.name == wanted) {
            return Ok(all.swap_remove(at));
        }
        let names: Vec<&str> = all.iter().map(|known| known.name.as_str()).collect();
        Err(Refusal::UnknownModel { model: name.to_owned(), known: names.join(", ") })
    }

    pub(super) fn resolve_model(&self, name: &str) -> String {
        let view = self.dispatch.fleet.view();
        resolve(name, view.models().into_iter().map(|model| model.id.as_str()))
    }

    /// The longest context that a model takes, if known.
    pub(super) fn longest_context(&self, name: &str) -> Option<u64> {
        let view = self.dispatch.fleet.view();
        let model = view.models().into_iter().find(|model| model.id == name)?;
        CatalogModel::of(&view, model).max_context
    }
}
