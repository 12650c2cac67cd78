//! `Place` and `Release`: a replica for a request that its caller sends itself.

use std::time::Duration;

use hostler_placement::cost::has_room;
use hostler_proto::inference::v1 as wire;
use tonic::{Code, Status};

use super::status;
use crate::admission::Permit;
use crate::bookings::Bookings;
use crate::dispatch::ExternalPlacement;
use crate::keys::Caller;
use crate::placement::PlacementDecision;

/// How long a booking lasts by default.
const DEFAULT_BOOKING_TIME: Duration = Duration::from_secs(30);

/// Longest booking. A caller that has died counts for this long.
const MAX_BOOKING_TIME: Duration = Duration::from_secs(600);

const MAX_CANDIDATES: usize = 64;

pub(super) fn place_response(
    reserved: ExternalPlacement,
    permit: Permit,
    bookings: &Bookings,
    caller: &Caller,
    (placement, lasts, tells): (wire::Placement, Duration, bool),
) -> wire::PlaceResponse {
    let ExternalPlacement { replica, in_flight, decision: record, prefill_estimate: computing } = reserved;
    let id = record.id;
    bookings.book(id, (in_flight, permit), caller, (computing, lasts));
    wire::PlaceResponse {
        placement: Some(placement),
        node: replica.node.to_string(),
        epoch: replica.epoch,
        address: replica.state.engine_socket.clone(),
        has_room: has_room(&record.choice().1.candidate),
        booking: Some(wire::Booking { id: format!("{id:016x}"), expires_in: prost_types::Duration::try_from(lasts).ok() }),
        candidates: if tells { candidates(&record) } else { Vec::new() },
    }
}

pub(super) fn release(bookings: &Bookings, caller: &Caller, name: &str) -> Result<(), Status> {
    let id = u64::from_str_radix(name, 16).map_err(|_| status::invalid_field("booking", "this is no booking's id"))?;
    if bookings.release(id, caller) {
        return Ok(());
    }
    Err(status::with_reason(Code::NotFound, "BOOKING_NOT_FOUND", "there is no such booking: it has expired, or was released before", &[]))
}

pub(super) fn booking_time(hold: Option<&prost_types::Duration>) -> Result<Duration, Status> {
    let Some(hold) = hold else { return Ok(DEFAULT_BOOKING_TIME) };
    let hold = Duration::try_from(*hold).ok().filter(|hold| !hold.is_zero());
    hold.map(|hold| hold.min(MAX_BOOKING_TIME)).ok_or_else(|| status::invalid_field("hold", "a booking lasts for more than no time"))
}

/// The candidates of a decision, the cheapest first.
fn candidates(record: &PlacementDecision) -> Vec<wire::Candidate> {
    let scored = record.decision.scored.iter().zip(&record.replica_names).enumerate();
    let mut candidates: Vec<wire::Candidate> = scored
        .map(|(at, (scored, name))| wire::Candidate {
            replica: name.to_string(),
            matched_tokens: scored.candidate.matched,
            in_flight: scored.candidate.in_flight,
            predicted_first_token_seconds: scored.terms.first_token(),
            cost_seconds: scored.terms.total(),
            chosen: at == record.decision.chosen,
        })
        .collect();
    candidates.sort_by(|left, right| left.cost_seconds.total_cmp(&right.cost_seconds));
    candidates.truncate(MAX_CANDIDATES);
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_booking_lasts_as_requested_within_a_bound() {
        let of = |seconds, nanos| booking_time(Some(&prost_types::Duration { seconds, nanos })).map_err(|status| status.code());
        assert_eq!(booking_time(None).unwrap(), DEFAULT_BOOKING_TIME);
        assert_eq!(of(0, 250_000_000), Ok(Duration::from_millis(250)));
        assert_eq!(of(1_000_000, 0), Ok(MAX_BOOKING_TIME));
        assert_eq!(of(0, 0), Err(Code::InvalidArgument));
        assert_eq!(of(-1, 0), Err(Code::InvalidArgument));
    }
}
