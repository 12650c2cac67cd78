//! The way of every request into the fleet, whatever API it came by: peeked at, admitted, dispatched.

use bytes::Bytes;
use hostler_proto::lane::RequestHead;
use http::Method;
use http::header::HeaderMap;
use http::uri::PathAndQuery;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use super::access::Entry;
use super::body::NoRoom;
use super::content::Content;
use super::form;
use super::headers;
use super::ids;
use super::invocation;
use super::isolation::{Plain, Salted};
use super::peek::{Peek, is_nobodys_json, peek};
use super::routes::Edge;
use super::state::owner;
use super::work::{computes_nothing, tokens, work};
use crate::admission::{UsageEstimate, LimitKind, LimitExceeded, Permit};
use crate::dispatch::{Answer, Dialect, OutboundRequest, Refusal, ExternalPlacement};
use crate::keys::{Caller, Role};
use crate::metrics::RefusalReason;
use crate::placement::{PlacementRequest, QueueShare};
use crate::sticky::{Keep, Named};

/// Said to callers whose use is limited.
const NO_BACKGROUND: &str = "`background` is not for keys with limits, as nobody would count what it uses: send the request without it, \
    with `stream` if it takes long";

/// A request for an engine, in the engine's own API, and who sends it.
#[derive(Debug)]
pub(crate) struct Inquiry {
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    /// As the client sent them; those of one connection are left out on the way.
    pub(crate) headers: HeaderMap,
    /// Complete.
    pub(crate) body: Bytes,
    pub(crate) caller: Caller,
    /// Its line in the access log.
    pub(crate) entry: Entry,
    /// When it came.
    pub(crate) begun: Instant,
}

/// Why a request got no engine's answer. Each API tells it in its own form.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Declined {
    /// It cannot be understood.
    #[error("{0}")]
    Malformed(String),
    /// Its caller may not send it.
    #[error("{0}")]
    Forbidden(String),
    /// Its caller, or the router, has too much in flight.
    #[error(transparent)]
    Limited(#[from] LimitExceeded),
    /// The fleet cannot answer it.
    #[error(transparent)]
    Fleet(#[from] Refusal),
    /// It names a response that its caller does not have.
    #[error("Response with id '{0}' not found.")]
    NoResponse(String),
}

impl Declined {
    /// How it is counted.
    fn reason(&self) -> RefusalReason {
        match self {
            Self::Malformed(_) | Self::Forbidden(_) | Self::NoResponse(_) | Self::Fleet(Refusal::UnknownModel { .. }) => RefusalReason::Request,
            Self::Limited(limited) if limited.limit != LimitKind::Router => RefusalReason::Limit,
            Self::Limited(_) | Self::Fleet(Refusal::Overloaded { .. }) => RefusalReason::Full,
            Self::Fleet(Refusal::CrashSuspect(_)) => RefusalReason::CrashSuspect,
            Self::Fleet(_) => RefusalReason::Fleet,
        }
    }

    /// The word for it in the access log.
    fn cause(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::Forbidden(_) => "forbidden",
            Self::Limited(_) => "limited",
            Self::Fleet(refusal) => refusal.as_str(),
            Self::NoResponse(_) => "no_response",
        }
    }
}

impl Edge {
    /// Has an engine answer a request. It is read and admitted when this is called, and counted from then on: the future is to be awaited at once.
    ///
    /// # Errors
    /// When no engine does; an engine's own refusal is an answer.
    pub(crate) fn submit(&self, inquiry: Inquiry) -> impl Future<Output = Result<Answer, Declined>> {
        let (entry, caller) = (inquiry.entry.clone(), inquiry.caller.clone());
        // Not within the future, which would keep room for the inquiry as long as the request waits.
        let prepared = self.prepared(inquiry);
        async move {
            let submitted = async {
                let (mut outgoing, permit) = prepared?;
                outgoing.placement_request.required_engine = self.only(&outgoing.referenced_response, &caller).await?;
                Ok(self.dispatch.send(outgoing, permit).await.map_err(|refusal| self.discreet(refusal, &caller))?)
            };
            submitted.await.inspect_err(|declined| self.count(declined, &entry))
        }
    }

    /// Has a replica chosen for a request that its caller sends itself, which counts like any other until it is dropped.
    ///
    /// # Errors
    /// When it may not be sent, or no replica can take it.
    pub(crate) async fn reserve(&self, inquiry: Inquiry) -> Result<(ExternalPlacement, Permit), Declined> {
        let entry = inquiry.entry.clone();
        let caller = inquiry.caller.clone();
        let reserved = async {
            let (outgoing, permit) = self.prepared(inquiry)?;
            Ok((self.dispatch.place_external(outgoing).await.map_err(|refusal| self.discreet(refusal, &caller))?, permit))
        };
        reserved.await.inspect_err(|declined| self.count(declined, &entry))
    }

    fn count(&self, declined: &Declined, entry: &Entry) {
        entry.refused(declined.cause());
        self.dispatch.metrics.count_refusal(declined.reason());
    }

    /// A refusal that does not name models which its caller may not use.
    fn discreet(&self, refusal: Refusal, caller: &Caller) -> Refusal {
        match refusal {
            Refusal::UnknownModel { model, .. } if caller.models.is_some() => Refusal::UnknownModel { model, known: self.known_to(caller) },
            refusal => refusal,
        }
    }

    /// Whether it depends on what a body says what its caller may do. Of a form that is which model it asks for, and nothing else.
    fn depends(&self, content: Content<'_>, caller: &Caller) -> bool {
        let by_key = if matches!(content, Content::Form(_)) { caller.models.is_some() } else { self.keys.are_wanted() };
        by_key || self.isolation.is_some()
    }

    /// Looks at what an engine would fetch for a request. A sound has any bytes; whatever else a body is called, an engine might read it as JSON.
    fn check_media(&self, content: Content<'_>, body: &[u8], entry: &Entry) -> Result<(), Declined> {
        if matches!(content, Content::Form(_)) {
            return Ok(());
        }
        self.media.check(body, self.isolation.is_some()).map_err(|message| {
            entry.refused("media");
            Declined::Malformed(message)
        })
    }

    /// A request that may enter, as it will be sent.
    pub(crate) fn prepared(&self, inquiry: Inquiry) -> Result<(Box<OutboundRequest>, Permit), Declined> {
        let Inquiry { method, path, headers, body, caller, entry, begun } = inquiry;
        let content = Content::of(&headers);
        let mut peek = peeked(content, &body, self.depends(content, &caller)).map_err(Declined::Malformed)?;
        let route = invocation::carried(path.path(), &peek);
        let named = invocation::model(path.path(), &headers).map_err(Declined::Malformed)?;
        let id = ids::draw();
        entry.submitted(id, named.as_deref().or(peek.model.as_deref()));
        permit(&caller, &method, path.path(), named.as_deref(), &peek).map_err(Declined::Forbidden)?;
        if caller.role != Role::Admin && (peek.is_urgent || headers::is_urgent(&headers)) {
            return Err(Declined::Forbidden(impatient(&caller)));
        }
        peek.model = named.or(peek.model);
        self.check_media(content, &body, &entry)?;
        let plain = Plain { tenant: owner(&caller), route, content, body: &body, peek: &peek };
        let salted = match &self.isolation {
            Some(isolation) if !computes_nothing(route) => isolation.salted(&plain).map_err(Declined::Malformed)?,
            _ => None,
        };
        let room_for = salted.as_ref().map_or(&body, |salted| &salted.body);
        let guest = guest(&caller, &headers, peek.user.as_deref(), room_for.len());
        let room = self.reading.room(guest).map_err(|full| without_room(&full))?;
        let names = Named::of(&method, route, peek.previous.as_deref());
        if peek.background && names.makes_one() && caller.limits.bound_use() {
            return Err(Declined::Malformed(NO_BACKGROUND.into()));
        }
        let work = work(route, body.len(), &peek);
        let most_output = peek.most_output.number();
        let output = if work.generates() { self.dispatch.placer.expected_output_tokens(most_output) } else { 0 };
        let input = if work.is_some() { peek.text.iter().map(|text| tokens(text)).sum() } else { 0 };
        let permit = self.admission.admit(&caller, UsageEstimate { prompt_tokens: input, output_tokens: output, body_bytes: body.len() as u64 })?;
        if let Some(chosen) = peek.chosen.as_deref().filter(|id| names.makes_one() && self.sticky.is_of_another(id, owner(&caller), begun))
        {
            let message = format!("`{chosen}` is the name of a response that is not yours: choose another `request_id`");
            return Err(Declined::Forbidden(message));
        }
        let part = |text: &str| salted.as_ref().map_or_else(|| body.slice_ref(text.as_bytes()), |salted| salted.part(&body, text));
        let text = if !work.is_some() { Vec::new() } else { peek.text.iter().map(|text| part(text)).collect() };
        let unsalted = || (body.clone(), peek.salt.unwrap_or_default());
        let (body, salt) = salted.map_or_else(unsalted, |Salted { body, salt, .. }| (body, salt));
        // Not the texts, which go when it has been chosen where the request goes: an answer may have begun while the rest of the body waits to be sent.
        let body = room.around(body);
        let outgoing = Box::new(OutboundRequest {
            id,
            priority: band(&caller, headers::priority(&headers).or(peek.priority).unwrap_or(0)),
            tenant: tenant(&caller).unwrap_or_default(),
            queue_share: guest,
            queue_slot: None,
            client_id: headers::client_id(&headers),
            placement_request: PlacementRequest {
                model: peek.model.filter(|model| !model.is_empty()),
                path: route.to_owned(),
                prompt_parts: text,
                cache_salt: salt,
                max_output_tokens: if work.generates() { most_output } else { Some(0) },
                is_stream: peek.stream,
                required_engine: None,
                body: body.clone(),
            },
            dialect: Dialect::for_path(route),
            work,
            stored_response: names.makes_one().then(|| Keep { sticky: self.sticky.clone(), tenant: owner(&caller).clone() }),
            referenced_response: names,
            head: RequestHead {
                method: method.as_str().to_owned(),
                path: path.as_str().to_owned(),
                headers: headers::outgoing(&headers, !self.keys.are_wanted()),
                body_bytes: body.len() as u64,
                guided: peek.guided,
                ..RequestHead::default()
            },
            body,
            log_entry: entry,
            received_at: begun,
        });
        Ok((outgoing, permit))
    }
}

/// Who has a turn together: a tenant's callers, or whoever has one key; `None` where there are no keys.
fn tenant(caller: &Caller) -> Option<u64> {
    let name = if caller.tenant.is_empty() { &caller.key } else { &caller.tenant };
    (!name.is_empty()).then(|| xxh3_64(name.as_bytes()))
}

/// Who shares the router's room with whom, and how many `bytes` of it a request takes. Without keys a client may say which `user` it is for.
pub(super) fn guest(caller: &Caller, headers: &HeaderMap, user: Option<&str>, bytes: usize) -> QueueShare {
    let tenant = tenant(caller).unwrap_or_else(|| headers::tenant(headers, user));
    QueueShare { tenant, weight: caller.limits.weight.unwrap_or(1.0), bytes: bytes as u64 }
}

/// What the caller is told whose body finds no room.
fn without_room(full: &NoRoom) -> LimitExceeded {
    LimitExceeded { message: full.to_string(), retry_after: 1, limit: LimitKind::Router }
}

/// The band in which a caller's request waits. Where there are keys, only admins go before the others: everybody would.
fn band(caller: &Caller, asked: i32) -> i32 {
    if caller.role == Role::Admin { asked } else { asked.max(0) }
}

/// Whether a caller may send this request. What an invocation has `named` is the model that engines take; the body's must be allowed too, since
/// other releases may read it.
fn permit(caller: &Caller, method: &Method, path: &str, named: Option<&str>, peek: &Peek<'_>) -> Result<(), String> {
    if path != invocation::PATH || caller.models.is_none() {
        return caller.permit(method, path, peek.model.as_deref());
    }
    let named = named.ok_or_else(invocation::unnamed)?;
    [Some(named), peek.model.as_deref()].into_iter().flatten().try_for_each(|model| caller.permit(method, path, Some(model)))
}

/// What a caller is told that may not go before others, where engines schedule by priority.
fn impatient(caller: &Caller) -> String {
    format!("the key {} may ask for a `priority` of 0 or more, in plain digits: only an admin's requests go before others", caller.key)
}

/// What a body says of the request. Bodies of other types are for the engine alone to understand, and so is what is wrong with this one,
/// unless what its caller may do depends on it.
fn peeked<'a>(content: Content<'_>, body: &'a Bytes, depends: bool) -> Result<Peek<'a>, String> {
    match content {
        _ if body.is_empty() => Ok(Peek::default()),
        Content::Other => Ok(Peek::default()),
        Content::Form(kind) => form::peek(kind, body).or_else(|odd| if depends { Err(odd.to_string()) } else { Ok(Peek::default()) }),
        Content::Json => match peek(body) {
            Err(_) if !depends && is_nobodys_json(body) => Ok(Peek::default()),
            peeked => peeked.map_err(|error| error.to_string()),
        },
    }
}
