//! Submits every request to the fleet, for all APIs: peeks at it, admits and dispatches it.

use bytes::Bytes;
use hostler_api::{self as api, Route};
use hostler_proto::lane::RequestHead;
use http::{HeaderMap, Method};
use std::ops::Range;
use std::sync::Arc;
use tokio::time::Instant;

use super::body::BodyReservation;
use super::body_format::BodyFormat;
use super::edge::Edge;
use super::form;
use super::headers;
use super::ids;
use super::invocation;
use super::isolation::{SaltedBody, UnsaltedRequest};
use super::peek::{Peek, is_invalid_for_engines, peek};
use super::request::{InboundRequest, Prepared, Rejection};
use super::resume_choice::ResumeChoice;
use super::share::queue_share;
use super::work_estimate::{charged_answers, estimate_tokens, estimate_work, output_bounds, sequences};
use crate::access_log::{AccessEntry, client_id};
use crate::admission::{LimitExceeded, Permit, UsageEstimate};
use crate::dispatch::{Answer, ExternalPlacement, OutboundRequest, Refusal, Work};
use crate::fan_out::{FanOut, FanOutForm};
use crate::fleet::{EngineLaunch, Replica};
use crate::keys::{Caller, Role};
use crate::placement::{OutputBounds, PlacementRequest};
use crate::response_affinity::{ResponseRecorder, ResponseReference};
use crate::resumption::ask_for_tokens;

/// The refusal for callers with limits.
const NO_BACKGROUND: &str = "`background` is not for keys with limits, as nobody would count what it uses: send the request without it, \
    with `stream` if it takes long";

impl Edge {
    /// Has an engine answer a prepared request of `caller`.
    ///
    /// # Errors
    /// If no engine answers.
    pub(crate) async fn send(
        &self,
        prepared: Result<Prepared, Rejection>,
        caller: &Caller,
        entry: &AccessEntry,
    ) -> Result<Answer, Rejection> {
        let submitted = async {
            let (mut outgoing, permit) = prepared?;
            entry.record_admission();
            outgoing.placement_request.required_engine = self.find_required_engine(&outgoing.referenced_response, caller).await?;
            Ok(self.dispatch.send(outgoing, permit).await.map_err(|refusal| self.hide_other_models(refusal, caller))?)
        };
        submitted.await.inspect_err(|rejection| self.count_rejection(rejection, entry))
    }

    /// Chooses a replica for a request that `caller` sends itself. The request counts like any
    /// other until the result is dropped.
    ///
    /// # Errors
    /// If the request may not be sent, or no replica can take it.
    pub(crate) async fn reserve(
        &self,
        prepared: Result<Prepared, Rejection>,
        caller: &Caller,
        entry: &AccessEntry,
    ) -> Result<(ExternalPlacement, Permit), Rejection> {
        let reserved = async {
            let (outgoing, permit) = prepared?;
            entry.record_admission();
            Ok((self.dispatch.place_external(outgoing).await.map_err(|refusal| self.hide_other_models(refusal, caller))?, permit))
        };
        reserved.await.inspect_err(|rejection| self.count_rejection(rejection, entry))
    }

    /// Counts a request that no engine answers.
    pub(crate) fn count_rejection(&self, rejection: &Rejection, entry: &AccessEntry) {
        entry.record_refusal(rejection.as_str());
        self.dispatch.metrics.count_refusal(rejection.refusal_reason());
    }

    /// Removes from a refusal the models that its caller may not use.
    fn hide_other_models(&self, refusal: Refusal, caller: &Caller) -> Refusal {
        match refusal {
            Refusal::UnknownModel { model, .. } if caller.models.is_some() => {
                Refusal::UnknownModel { model, known: self.known_models(caller) }
            }
            refusal => refusal,
        }
    }

    /// Whether the caller's permissions depend on the body. For a form, only the model matters.
    fn needs_readable_body(&self, content: BodyFormat<'_>, caller: &Caller) -> bool {
        let by_key = if matches!(content, BodyFormat::Form(_)) { caller.models.is_some() } else { self.keys.are_required() };
        by_key || self.isolation.is_some()
    }

    /// Checks the media that an engine would fetch for a request. Audio may be any bytes; an engine
    /// might read any other body as JSON, whatever its type.
    fn check_media(&self, content: BodyFormat<'_>, body: &[u8], entry: &AccessEntry) -> Result<(), Rejection> {
        if matches!(content, BodyFormat::Form(_)) {
            return Ok(());
        }
        self.media_hosts.check(body, self.isolation.is_some()).map_err(|message| {
            entry.record_refusal("media");
            Rejection::Malformed(message)
        })
    }

    /// Checks and admits a request. Returns it as it will be sent.
    pub(crate) fn prepare(&self, inbound: InboundRequest) -> Result<Prepared, Rejection> {
        let InboundRequest { method, path, headers, body, reservation, caller, log_entry: entry, received_at: begun } = inbound;
        let content = BodyFormat::from_headers(&headers);
        let mut peek = peek_body(content, &body, self.needs_readable_body(content, &caller)).map_err(Rejection::Malformed)?;
        let asked = Route::of(path.path());
        let route = invocation::effective_route(asked, &peek);
        let effective_path = if route == asked { path.path() } else { route.path() };
        let named = invocation::model_from_header(asked, &headers).map_err(Rejection::Malformed)?;
        let id = ids::next_request_id();
        entry.set_request(id, named.as_deref().or(peek.model.as_deref()));
        check_permission(&caller, &method, path.path(), named.as_deref(), &peek).map_err(Rejection::Forbidden)?;
        check_priority(&caller, &headers, &peek).map_err(Rejection::Forbidden)?;
        peek.model = named.or(peek.model);
        self.check_tools(route, &peek).map_err(Rejection::Malformed)?;
        let body = self.cut_output(route, &peek, body);
        self.check_media(content, &body, &entry)?;
        let plain = UnsaltedRequest { tenant: caller.owner(), route, content, body: &body, peek: &peek };
        let salted = match &self.isolation {
            Some(isolation) if route.work() != api::Work::Nothing => isolation.add_salt(&plain).map_err(Rejection::Malformed)?,
            _ => None,
        };
        let plain = salted.as_ref().map_or(&body, |salted| &salted.body);
        let share = queue_share(&caller, &headers, peek.user.as_deref(), plain.len());
        let mut room = reservation.transfer_to(share).map_err(LimitExceeded::from)?;
        let reference = ResponseReference::parse(&method, effective_path, peek.previous_response_id.as_deref());
        if peek.background && reference.creates_response() && caller.limits.has_usage_limits() {
            return Err(Rejection::Malformed(NO_BACKGROUND.into()));
        }
        let Estimate { work, output_bounds, sequences, usage } = self.estimate(route, &peek, &body);
        let permit = self.admission.admit(&caller, usage)?;
        self.check_response_id(&reference, peek.response_id.as_deref(), &caller, begun)?;
        let is_json = method == Method::POST && matches!(content, BodyFormat::Json);
        let resumption = self.choose_resumption(&path, (plain, is_json), &peek);
        let asking = matches!(resumption, ResumeChoice::Continue(_)).then(|| ask_for_tokens(plain));
        let prompt_parts = if work.is_some() { std::mem::take(&mut peek.prompt_parts) } else { Vec::new() };
        let EngineBody { body, salt, prompt_parts } = EngineBody::new((body, peek.salt, prompt_parts), salted, asking);
        let fan_out = self.fan_out((route, sequences), peek.model.as_deref(), (&body, &prompt_parts), &mut room)?;
        // The texts do not hold the reservation: they are dropped once the replica has been chosen,
        // and an answer may begin while the rest of the body waits to be sent.
        let body = room.wrap(body);
        let placement_request = PlacementRequest {
            tenant: share.tenant,
            model: peek.model.filter(|model| !model.is_empty()),
            path: effective_path.to_owned(),
            prompt_parts: prompt_parts.iter().map(|part| body.slice(part.clone())).collect(),
            cache_salt: salt,
            output_bounds,
            sequences,
            is_stream: peek.is_stream,
            is_suspect: false,
            required_engine: None,
            body: body.clone(),
        };
        let outgoing = Box::new(OutboundRequest {
            resume_plan: resumption.into_plan(&placement_request, prompt_parts),
            id,
            priority: clamp_priority(&caller, headers::priority(&headers).or(peek.priority).unwrap_or(0)),
            tenant: caller.tenant_hash().unwrap_or_default(),
            owner: caller.owner().clone(),
            queue_share: share,
            queue_slot: None,
            client_id: client_id(&headers),
            placement_request,
            dialect: route.dialect(),
            work,
            stored_response: reference
                .creates_response()
                .then(|| ResponseRecorder { affinity: self.response_affinity.clone(), tenant: caller.owner().clone() }),
            referenced_response: reference,
            fan_out,
            head: RequestHead {
                method: method.as_str().to_owned(),
                path: path.as_str().to_owned(),
                headers: headers::headers_for_engine(&headers, !self.keys.are_required()),
                body_bytes: body.len() as u64,
                guided: peek.is_guided,
                ..RequestHead::default()
            },
            body,
            log_entry: entry,
            received_at: begun,
        });
        Ok((outgoing, permit))
    }

    /// Checks that an engine of the model reads its calls, if the model may make some. Engines name
    /// flags in their refusal, which clients cannot set.
    fn check_tools(&self, route: Route, peek: &Peek) -> Result<(), String> {
        if !peek.has_tools || peek.forbids_tools || !matches!(route, Route::ChatCompletions | Route::Messages) {
            return Ok(());
        }
        let view = self.dispatch.fleet.view();
        let model = peek.model.as_deref().filter(|model| !model.is_empty());
        let mut serving = view.replicas.iter().filter(|replica| replica.serves(model)).peekable();
        let refuses = |replica: &Arc<Replica>| replica.state.launch.as_ref().is_some_and(EngineLaunch::refuses_tools);
        if serving.peek().is_none() || !serving.all(refuses) {
            return Ok(());
        }
        Err(format!(
            "the engines of {} read no tool calls: send the request without `tools` or with `\"tool_choice\": \"none\"`; where the model \
             has tools, its operator gives the engines `--enable-auto-tool-choice --tool-call-parser NAME` (`hostler plan` says why they \
             have none)",
            model.unwrap_or("this model")
        ))
    }

    /// The body of a message whose `max_tokens` is beyond the model's context, with the context in
    /// its place. Clients of that API send their own model's limit, and engines use what is left.
    /// What stands behind the number keeps its place.
    fn cut_output(&self, route: Route, peek: &Peek, body: Bytes) -> Bytes {
        let (Route::Messages, Some(at)) = (route, &peek.max_tokens_at) else { return body };
        let view = self.dispatch.fleet.view();
        let serving = view.replicas.iter().filter(|replica| replica.serves(peek.model.as_deref()));
        let contexts = serving.filter_map(|replica| replica.state.launch.as_ref()?.max_context_tokens);
        let Some(context) = contexts.min() else { return body };
        let width = at.len();
        if peek.max_output.count().is_none_or(|most| most <= context) || context.to_string().len() > width {
            return body;
        }
        let number = format!("{context:<width$}");
        [&body[..at.start], number.as_bytes(), &body[at.end..]].concat().into()
    }

    /// Checks the id that a caller has chosen for the response.
    fn check_response_id(
        &self,
        reference: &ResponseReference,
        chosen: Option<&str>,
        caller: &Caller,
        now: Instant,
    ) -> Result<(), Rejection> {
        let is_taken = |id: &&str| reference.creates_response() && self.response_affinity.belongs_to_another(id, caller.owner(), now);
        let Some(chosen) = chosen.filter(is_taken) else { return Ok(()) };
        let message = format!("`{chosen}` is the name of a response that is not yours: choose another `request_id`");
        Err(Rejection::Forbidden(message))
    }

    /// Splits a request of several answers, or of one in a list, if some engine of its model gives
    /// one at a time.
    fn fan_out(
        &self,
        (route, answers): (Route, u32),
        model: Option<&str>,
        (body, prompt_parts): (&Bytes, &[Range<usize>]),
        room: &mut BodyReservation,
    ) -> Result<Option<FanOut>, Rejection> {
        let has_list = || route == Route::Completions && prompt_parts.iter().any(|part| body[part.start] == b'[');
        let Some(form) = FanOutForm::for_route(route).filter(|_| answers > 1 || has_list()) else { return Ok(None) };
        let is_needed = |replica: &Arc<Replica>| replica.serves(model) && replica.has_rust_front_end();
        if !self.dispatch.fleet.view().replicas.iter().any(is_needed) {
            return Ok(None);
        }
        let fan_out = FanOut::split(form, body).map_err(|error| Rejection::Malformed(error.to_string()))?;
        if fan_out.is_some() {
            // The body, and bodies of at most twice its length.
            room.count_copies(3, body.len()).map_err(LimitExceeded::from)?;
        }
        Ok(fan_out)
    }

    /// Estimates the work of a request. Each of its answers may be as long as the body allows for
    /// one.
    fn estimate(&self, route: Route, peek: &Peek, body: &Bytes) -> Estimate {
        let work = estimate_work(route, body, peek);
        let output_bounds = if work.generates() { output_bounds(peek) } else { OutputBounds::NOTHING };
        let answers = charged_answers(work, peek);
        let expected = self.dispatch.placer.expected_output_tokens(output_bounds);
        let usage = UsageEstimate {
            prompt_tokens: if work.is_some() { peek.texts(body).map(estimate_tokens).sum() } else { 0 },
            output_tokens: expected.saturating_mul(answers),
            max_output_tokens: peek.max_output.count().map(|most| most.saturating_mul(answers)),
            body_bytes: body.len() as u64,
        };
        Estimate { work, output_bounds, sequences: sequences(answers), usage }
    }
}

/// The work that a request asks of an engine, by its route and body.
struct Estimate {
    work: Work,
    output_bounds: OutputBounds,
    sequences: u32,
    usage: UsageEstimate,
}

/// A body as an engine gets it.
struct EngineBody {
    body: Bytes,
    /// The salt of its cached blocks.
    salt: String,
    prompt_parts: Vec<Range<usize>>,
}

impl EngineBody {
    /// The received body with its salt and the places of its prompt, unless it was `salted` for its
    /// tenant. `asking` is the same body that also asks for tokens, at its end: everything before
    /// that keeps its place.
    fn new(received: (Bytes, Option<String>, Vec<Range<usize>>), salted: Option<SaltedBody>, asking: Option<Bytes>) -> Self {
        let (body, salt, prompt_parts) = match (received, salted) {
            ((_, _, parts), Some(salted)) => {
                let parts = parts.iter().map(|part| salted.relocate(part)).collect();
                (salted.body, salted.salt, parts)
            }
            ((body, salt, parts), None) => (body, salt.unwrap_or_default(), parts),
        };
        Self { body: asking.unwrap_or(body), salt, prompt_parts }
    }
}

/// The priority that a caller gets. With keys, only admins may go before others; otherwise
/// everybody would.
fn clamp_priority(caller: &Caller, asked: i32) -> i32 {
    if caller.role == Role::Admin { asked } else { asked.max(0) }
}

/// Checks that a caller may send this request. `named` is the model of an invocation's header,
/// which engines use. The body's model must be allowed too, because other releases may read it.
fn check_permission(caller: &Caller, method: &Method, path: &str, named: Option<&str>, peek: &Peek) -> Result<(), String> {
    if Route::of(path) != Route::Invocations || caller.models.is_none() {
        return caller.check_permission(method, path, peek.model.as_deref());
    }
    let named = named.ok_or_else(invocation::missing_model_message)?;
    [Some(named), peek.model.as_deref()].into_iter().flatten().try_for_each(|model| caller.check_permission(method, path, Some(model)))
}

/// Checks that a caller may have its request go before others, if engines schedule by priority.
fn check_priority(caller: &Caller, headers: &HeaderMap, peek: &Peek) -> Result<(), String> {
    if caller.role == Role::Admin || !(peek.is_urgent || headers::asks_engine_priority(headers)) {
        return Ok(());
    }
    Err(format!("the key {} may ask for a `priority` of 0 or more, in plain digits: only an admin's requests go before others", caller.key))
}

/// Reads the fields of a body. Engines judge bodies of other types, and faults of this one unless
/// permissions depend on it.
fn peek_body(content: BodyFormat<'_>, body: &Bytes, depends: bool) -> Result<Peek, String> {
    content.check_value_count(body)?;
    match content {
        _ if body.is_empty() => Ok(Peek::default()),
        BodyFormat::Other => Ok(Peek::default()),
        BodyFormat::Form(kind) => form::peek(kind, body).or_else(|odd| if depends { Err(odd.to_string()) } else { Ok(Peek::default()) }),
        BodyFormat::Json => match peek(body) {
            Err(_) if !depends && is_invalid_for_engines(body) => Ok(Peek::default()),
            peeked => peeked.map_err(|error| error.to_string()),
        },
    }
}
