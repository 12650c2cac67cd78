use super::*;
use crate::admission::{Admission, UsageEstimate};
use crate::fleet::{InFlightCost as Cost, LocalLoad};

const SECOND: Duration = Duration::from_secs(1);

struct Fixture {
    own: Arc<LocalLoad>,
    admission: Admission,
    booked: BookingTable,
    began: Instant,
}

impl Fixture {
    fn new() -> Self {
        Self { own: Arc::default(), admission: Admission::new(10), booked: BookingTable::default(), began: Instant::now() }
    }

    /// Books a request that is computed for a second, and was expected to be answered then.
    fn book(&mut self, id: u64, seconds: u32) {
        let in_flight = self.own.start_request(
            Cost { sequences: 1, prompt_tokens: 100, uncached_tokens: 60, loaded_tokens: 0, read_tokens: 0, first_byte_due: 1.0 },
            None,
        );
        let permit = self.admission.admit(&Caller::anonymous("a".into()), UsageEstimate::default()).unwrap();
        let expires = self.began + seconds * SECOND;
        let next = expires.min(self.began + SECOND);
        let owner = ("".into(), "a".into());
        self.booked.by_id.insert(id, ExternalBooking { in_flight, _permit: permit, owner, next_check: next, expires });
        self.booked.timers.insert((next, id));
    }

    /// The counts after `seconds`: requests, tokens to compute, seconds overdue, permits.
    fn after(&mut self, seconds: u32) -> (u32, u64, f64, usize) {
        drop(self.booked.process_due(self.began + seconds * SECOND));
        (self.own.in_flight(), self.own.pending_tokens(), self.own.overdue_seconds(seconds.into()), self.admission.in_flight())
    }
}

#[tokio::test(start_paused = true)]
async fn a_booking_counts_until_expiry_and_its_prompt_until_prefilled() {
    let mut fixture = Fixture::new();
    fixture.book(1, 30);
    assert_eq!(fixture.after(0), (1, 60, 0.0, 1));
    assert_eq!(fixture.booked.process_due(fixture.began).0, Some(fixture.began + SECOND));
    assert_eq!(fixture.after(1), (1, 0, 0.0, 1));
    assert_eq!(fixture.after(29), (1, 0, 0.0, 1), "that nobody says it was answered is no sign of a slow engine");
    assert_eq!(fixture.after(30), (0, 0, 0.0, 0));
    assert_eq!(fixture.booked.process_due(fixture.began + 31 * SECOND).0, None);
}

#[tokio::test(start_paused = true)]
async fn bookings_expire_each_at_its_own_time() {
    let mut fixture = Fixture::new();
    for (id, seconds) in [(1, 5), (2, 3), (3, 8)] {
        fixture.book(id, seconds);
    }
    assert_eq!(fixture.after(2).0, 3);
    assert_eq!(fixture.after(4).0, 2);
    assert!(fixture.booked.remove(3).is_some());
    assert!(fixture.booked.remove(3).is_none());
    assert_eq!(fixture.after(4).0, 1);
    assert_eq!(fixture.after(6).0, 0);
    assert!(fixture.booked.timers.is_empty());
}
