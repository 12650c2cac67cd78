//! Translation of whole answers. Their bytes count as memory of whoever asked, from the engine
//! until the client has read them.

use bytes::Bytes;
use http::StatusCode;
use http_body::Body;

use crate::inbound::{BodyMemory, BodyMemoryFull, BodyReadError, SHORT_BODY_BYTES, read_plain};
use crate::placement::QueueShare;
use crate::thread_pool::{PoolError, ThreadPool};

/// Longest whole answer that is translated. Embeddings are the largest: those of two thousand texts
/// have about 100 MB in JSON.
const MAX_ANSWER_BYTES: usize = 256 * 1024 * 1024;

/// Why a client gets no translated answer.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(in crate::edge) enum WholeAnswerError {
    #[error(transparent)]
    MemoryFull(#[from] BodyMemoryFull),
    #[error("too many long answers, all or yours, are being translated here: try again soon")]
    Busy,
    #[error("the answer is too large: ask for less at once")]
    TooLarge,
    #[error("{0}")]
    Broken(String),
}

impl From<BodyReadError> for WholeAnswerError {
    fn from(failed: BodyReadError) -> Self {
        match failed {
            BodyReadError::MemoryFull(full) => Self::MemoryFull(full),
            BodyReadError::TooLarge(_) => Self::TooLarge,
            BodyReadError::Broken(why) => Self::Broken(why),
            other => Self::Broken(other.to_string()),
        }
    }
}

impl WholeAnswerError {
    pub(in crate::edge) fn status(&self) -> StatusCode {
        match self {
            Self::MemoryFull(_) | Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::TooLarge | Self::Broken(_) => StatusCode::BAD_GATEWAY,
        }
    }

    /// The error's type in OpenAI's form.
    pub(in crate::edge) fn kind(&self) -> &'static str {
        if self.status() == StatusCode::TOO_MANY_REQUESTS { "RateLimitError" } else { "BadGatewayError" }
    }
}

/// Translates the whole of an answer that is no stream, `owner`'s, on a thread of `readers` if it
/// is long. The relay ends the wait for a silent engine, and aborts when the client leaves.
pub(in crate::edge) async fn translate_whole<B>(
    (memory, readers): (&BodyMemory, &ThreadPool),
    owner: QueueShare,
    body: B,
    translate: impl FnOnce(Bytes) -> Result<Bytes, String> + Send + 'static,
) -> Result<Bytes, WholeAnswerError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let mut room = memory.reserve(QueueShare { bytes: 0, ..owner })?;
    // It counts twice, because its translation may be as long.
    let body = read_plain(body, MAX_ANSWER_BYTES, (&mut room, 2)).await?;
    let translated = if body.len() <= SHORT_BODY_BYTES {
        translate(body)
    } else {
        readers.run((owner.tenant, body.len()), move || translate(body)).await.map_err(|failed| match failed {
            PoolError::Full => WholeAnswerError::Busy,
            PoolError::Panicked => WholeAnswerError::Broken("the answer cannot be read".to_owned()),
        })?
    };
    let translated = translated.map_err(WholeAnswerError::Broken)?;
    Ok(room.transfer_to(QueueShare { bytes: translated.len() as u64, ..owner })?.wrap(translated))
}

/// The text of a whole answer. Blank text beside calls is none: models put line ends around them.
pub(in crate::edge) fn text_beside_calls(content: Option<String>, has_calls: bool) -> Option<String> {
    content.filter(|text| if has_calls { !text.trim().is_empty() } else { !text.is_empty() })
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;

    #[tokio::test]
    async fn an_answer_that_is_not_read_counts_as_its_askers_memory() {
        let (memory, readers) = (BodyMemory::new(16 * 1024 * 1024), ThreadPool::new(1));
        let ask = async |tenant, bytes| {
            let owner = QueueShare { tenant, weight: 1.0, bytes: 0 };
            translate_whole((&memory, &readers), owner, Full::new(Bytes::from(vec![b'1'; bytes])), Ok).await
        };
        let mut unread = Vec::new();
        let refused = loop {
            match ask(1, 1024 * 1024).await {
                Ok(answer) => unread.push(answer),
                Err(refused) => break refused,
            }
        };
        assert_eq!((refused.status(), unread.len() < 16), (StatusCode::TOO_MANY_REQUESTS, true));
        assert_eq!(ask(2, 1000).await.map(|answer| answer.len()), Ok(1000), "another tenant has room");
        drop(unread);
        assert_eq!(ask(1, 1024 * 1024).await.map(|answer| answer.len()), Ok(1024 * 1024));
    }

    #[tokio::test]
    async fn an_answer_without_a_translation_is_a_bad_gateway() {
        let (memory, readers) = (BodyMemory::new(16 * 1024 * 1024), ThreadPool::new(1));
        let owner = QueueShare { tenant: 1, weight: 1.0, bytes: 0 };
        let body = Full::new(Bytes::from_static(b"<html>"));
        let failed = translate_whole((&memory, &readers), owner, body, |_| Err("no JSON".to_owned())).await.unwrap_err();
        assert_eq!((failed.status(), failed.to_string().as_str()), (StatusCode::BAD_GATEWAY, "no JSON"));
    }
}
