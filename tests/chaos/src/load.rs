//! Clients of the load.
//!
//! Each sends one request after another to both routers, reads fast or slowly, leaves now and then,
//! and has each answer judged.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::client::{AnswerEnd, Client, ObservedAnswer, Pace};
use crate::fleet::Fleet;
use crate::plan::ROUTERS;
use crate::questions::{Question, SentRequest};
use crate::tally::Tally;
use crate::verdict::judge;

/// Longest wait of a client between an answer and its next question.
const MOST_THOUGHT_MS: u64 = 200;

/// Pause of a client that was told to come back or found no router.
const COME_BACK: Duration = Duration::from_millis(500);

/// State shared by all clients.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) questions: Vec<Question>,
    pub(crate) tally: Arc<Tally>,
    /// How long a client waits for an answer's end before it counts as a violation.
    pub(crate) patience: Duration,
    pub(crate) number: AtomicU64,
}

impl Load {
    /// Lets clients ask until a moment, and returns when each has its last answer.
    pub(crate) async fn run(self: &Arc<Self>, seed: u64, clients: u64, until: Instant) {
        let mut asking = JoinSet::new();
        for client in 0..clients {
            let load = self.clone();
            let random = Rng::with_seed(seed ^ (client + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            // A quarter of the clients use HTTP/2.
            asking.spawn(async move { load.client(random, client % 4 == 3, until).await });
        }
        asking.join_all().await;
    }

    async fn client(&self, mut random: Rng, two: bool, until: Instant) {
        let mut clients = self.fleet.routers.each_ref().map(|router| (Client::new(router.edge, two), router.moment()));
        while Instant::now() < until {
            let router = random.usize(..ROUTERS);
            let sent = self.question(&mut random);
            let pace = pace(&mut random);
            let seen = self.ask(&mut clients[router], router, &sent, pace).await;
            let again = if seen.status == Some(200) || seen.ended == AnswerEnd::Left { Duration::ZERO } else { COME_BACK };
            sleep(again + Duration::from_millis(random.u64(..MOST_THOUGHT_MS))).await;
        }
    }

    fn question(&self, random: &mut Rng) -> SentRequest {
        let question = &self.questions[random.usize(..self.questions.len())];
        question.ask(random, self.number.fetch_add(1, Ordering::Relaxed))
    }

    /// Sends a router one request, and has the answer judged.
    ///
    /// The moment beside the client is when its connection began.
    async fn ask(&self, (client, since): &mut (Client, u64), router: usize, sent: &SentRequest, pace: Pace) -> ObservedAnswer {
        let of = &self.fleet.routers[router];
        let moment = of.moment();
        if of.was_disturbed(*since) {
            client.hang_up();
            *since = moment;
        }
        let seen = client.ask(sent, pace, self.patience).await;
        match judge(sent, &seen, of.was_disturbed(moment)) {
            Ok(verdict) => {
                let prompt = sent.stream && pace.pause.is_zero();
                self.tally.verdict(verdict, seen.first_token.filter(|_| prompt && seen.status == Some(200)));
            }
            Err(why) => {
                let text = String::from_utf8_lossy(&seen.body);
                let end = text.char_indices().rev().nth(300).map_or(0, |(at, _)| at);
                self.tally.violation(&format!(
                    "router {router}, {} {}: {why:#}\n    asked {}\n    status {:?}, {:?}, ends with {:?}",
                    sent.path,
                    if sent.stream { "streamed" } else { "plain" },
                    sent.body.get(sent.body.len().saturating_sub(120)..).unwrap_or_default(),
                    seen.status,
                    seen.ended,
                    &text[end..],
                ));
            }
        }
        seen
    }

    /// Sends each router some requests without faults: all answers must be whole.
    pub(crate) async fn probe(&self, seed: u64) {
        let mut random = Rng::with_seed(seed);
        for router in 0..ROUTERS {
            let of = &self.fleet.routers[router];
            let mut client = (Client::new(of.edge, false), of.moment());
            for _ in 0..10 {
                let seen = self.ask(&mut client, router, &self.question(&mut random), Pace::default()).await;
                if seen.status != Some(200) || seen.ended != AnswerEnd::Clean {
                    self.tally.violation(&format!("a fleet that was left alone again answers {:?}, {:?}", seen.status, seen.ended));
                }
            }
        }
    }
}

fn pace(random: &mut Rng) -> Pace {
    match random.u8(..100) {
        // The client leaves before the first byte, among the events or after the end.
        0..12 => Pace { leaves: Some(Duration::from_millis(random.u64(1..1500))), pause: Duration::ZERO },
        12..20 => Pace { leaves: None, pause: Duration::from_millis(random.u64(5..100)) },
        _ => Pace::default(),
    }
}
