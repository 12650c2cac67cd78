//! Bounds the memory of a decoded gRPC message.
//!
//! Fields without content take two bytes on the wire and hundreds as values, so the fields of a
//! long message are counted before it is decoded.

use tonic::Status;

use super::status;

/// Most bytes of a field, decoded and then as JSON: a message of a chat has six texts.
const FIELD_BYTES: usize = 512;

/// Bytes that every message may take: 65,536 fields.
const FREE_BYTES: usize = 32 * 1024 * 1024;

/// Decoders go no deeper.
const MAX_DEPTH: usize = 100;

/// Length of a gRPC frame's head: whether the frame is compressed, and its length.
const FRAME_HEAD_BYTES: usize = 5;

/// Checks that a frame's fields take at most 32 MiB and twice its size.
///
/// # Errors
/// If the fields may take more.
pub(super) fn check_message_size(frame: &[u8]) -> Result<(), Status> {
    let most = (FREE_BYTES + 2 * frame.len()) / FIELD_BYTES;
    let fields = count_fields(frame.get(FRAME_HEAD_BYTES..).unwrap_or_default(), MAX_DEPTH).unwrap_or_default();
    if fields <= most {
        return Ok(());
    }
    let message = format!("the message has {fields} fields, and one of {} bytes may have {most}: send fewer at once", frame.len());
    Err(status::with_reason(tonic::Code::ResourceExhausted, "MESSAGE_TOO_LARGE", &message, &[("max_fields", &most.to_string())]))
}

/// The fields of a message and of all messages within. Bytes that might be a message count as one.
/// `None` for bytes that are no message.
fn count_fields(mut rest: &[u8], depth: usize) -> Option<usize> {
    let mut count = 0;
    while !rest.is_empty() {
        let tag = take_varint(&mut rest)?;
        if tag >> 3 == 0 {
            return None;
        }
        count += 1;
        match tag & 7 {
            0 => drop(take_varint(&mut rest)?),
            1 => rest = rest.get(8..)?,
            2 => {
                let length = usize::try_from(take_varint(&mut rest)?).ok()?;
                let within = rest.get(..length)?;
                rest = &rest[length..];
                if depth > 0 {
                    count += count_fields(within, depth - 1).unwrap_or_default();
                }
            }
            5 => rest = rest.get(4..)?,
            _ => return None,
        }
    }
    Some(count)
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for at in 0..10 {
        let byte = *rest.get(at)?;
        number |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            *rest = &rest[at + 1..];
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use hostler_proto::inference::v1::{Chat, ContentPart, GenerateRequest, Message, Texts, content_part::Part, generate_request::Prompt};
    use prost::Message as _;

    use super::*;

    fn frame(message: &GenerateRequest) -> Vec<u8> {
        [&[0; FRAME_HEAD_BYTES][..], &message.encode_to_vec()].concat()
    }

    fn chat(messages: Vec<Message>) -> GenerateRequest {
        GenerateRequest { prompt: Some(Prompt::Chat(Chat { messages, ..Chat::default() })), ..GenerateRequest::default() }
    }

    #[test]
    fn a_message_of_empty_fields_is_refused() {
        assert!(check_message_size(&frame(&chat(vec![Message::default(); 60_000]))).is_ok());
        let refused = check_message_size(&frame(&chat(vec![Message::default(); 200_000]))).unwrap_err();
        assert!(refused.message().starts_with("the message has 200001 fields"), "{refused:?}");
    }

    #[test]
    fn long_texts_are_few_fields() {
        let text = ContentPart { part: Some(Part::Text("\n\nall of them\n".repeat(100_000))) };
        let message = Message { role: "user".into(), content: vec![text], ..Message::default() };
        assert!(check_message_size(&frame(&chat(vec![message]))).is_ok());
    }

    #[test]
    fn bytes_that_are_no_message_have_no_fields() {
        for bytes in [&[0x00][..], &[0x0a], &[0x0a, 5, 1], &[0x0b], &[0xff; 11], &[0x09, 1], &[0x0d, 1]] {
            assert_eq!(count_fields(bytes, 9), None, "{bytes:?}");
        }
        let nested = Texts { texts: vec!["\u{8}\u{1}".into()] }.encode_to_vec();
        assert_eq!((count_fields(&nested, 9), count_fields(&nested, 0)), (Some(2), Some(1)));
    }
}
