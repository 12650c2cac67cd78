//! The stream's own request, kept to be sent again if its engine is lost.

use std::ops::Range;

use bytes::Bytes;
use hostler_api::Route;

use super::super::memory::{RecordMemory, RecordShare};
use crate::placement::{OutputBounds, PlacementRequest};

/// The APIs whose streams may be replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplayApi {
    Chat,
    Completions,
    Messages,
}

impl ReplayApi {
    #[must_use]
    pub(crate) fn for_route(route: Route) -> Option<Self> {
        match route {
            Route::ChatCompletions => Some(Self::Chat),
            Route::Completions => Some(Self::Completions),
            Route::Messages => Some(Self::Messages),
            _ => None,
        }
    }
}

/// Everything a replay needs besides the request's body.
#[derive(Debug)]
pub(crate) struct ReplayPlan {
    pub(crate) api: ReplayApi,
    path: String,
    model: Option<String>,
    cache_salt: String,
    /// The places of the prompt in the body.
    prompt_parts: Vec<Range<usize>>,
    output_bounds: OutputBounds,
    sequences: u32,
}

/// The body of a request whose answer streams.
#[derive(Debug)]
pub(crate) struct KeptBody {
    pub(crate) body: Bytes,
    _share: RecordShare,
}

impl KeptBody {
    /// Copies a body, if there is room for it. The original occupies room that new requests wait
    /// for.
    pub(crate) fn copy(body: &[u8], memory: &RecordMemory) -> Option<Self> {
        let mut share = memory.share();
        share.grow_to(body.len()).then(|| Self { body: Bytes::copy_from_slice(body), _share: share })
    }
}

impl ReplayPlan {
    /// The plan for a request that is to be placed.
    pub(crate) fn new(api: ReplayApi, request: &PlacementRequest, prompt_parts: Vec<Range<usize>>) -> Self {
        Self {
            api,
            path: request.path.clone(),
            model: request.model.clone(),
            cache_salt: request.cache_salt.clone(),
            prompt_parts,
            output_bounds: request.output_bounds,
            sequences: request.sequences,
        }
    }

    /// `tenant`'s request for its next placement.
    pub(crate) fn placement_request(&self, tenant: u64, body: &Bytes) -> PlacementRequest {
        let Self { path, model, cache_salt, prompt_parts, output_bounds, sequences, .. } = self;
        PlacementRequest {
            tenant,
            model: model.clone(),
            path: path.clone(),
            body: body.clone(),
            prompt_parts: prompt_parts.iter().map(|part| body.slice(part.clone())).collect(),
            cache_salt: cache_salt.clone(),
            output_bounds: *output_bounds,
            sequences: *sequences,
            is_stream: true,
            // Its engine was just lost.
            is_suspect: true,
            required_engine: None,
        }
    }
}
