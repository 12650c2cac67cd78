//! Asks the replicas for a response that this router does not know. The response may have come
//! through another router, or before a restart.

use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use hostler_api::Route;
use hostler_proto::lane::RequestHead;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::time::timeout;

use crate::engine_life::EngineLife;
use crate::fleet::{FleetView, Replica};

/// Most replicas that are queried. An unknown id costs each of them about a millisecond of its
/// front-end.
const MAX_QUERIED: usize = 32;

const QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// The ready replica that has the response, if any.
pub(crate) async fn query_replicas(view: &FleetView, id: &str) -> Option<EngineLife> {
    let ready = view.replicas.iter().filter(|replica| replica.is_ready()).take(MAX_QUERIED);
    let answers = join_all(ready.map(|replica| query_replica(replica, id))).await;
    answers.into_iter().flatten().next()
}

/// Asks one replica. The head of its answer suffices, so the exchange is dropped with it.
async fn query_replica(replica: &Replica, id: &str) -> Option<EngineLife> {
    let path = format!("{}/{}", Route::Responses.path(), utf8_percent_encode(id, NON_ALPHANUMERIC));
    let head = RequestHead { replica: replica.index, method: "GET".into(), path, ..RequestHead::default() };
    let exchange = replica.lanes.open(head, Bytes::new()).ok()?;
    let head = timeout(QUERY_TIMEOUT, poll_fn(|context| exchange.poll_head(context))).await.ok()?.ok()?;
    (head.status == 200).then(|| replica.engine_life())
}
