//! W3C's `traceparent`: the trace and span that a request belongs to, and whether that trace is
//! kept. It is read from clients' requests, and written into requests to engines.

use std::fmt;

use bytes::Bytes;
use hostler_proto::lane::Header;
use http::header::{HeaderMap, HeaderName};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Vendor state of the systems that a trace has passed through, meaningless without a
/// `traceparent`.
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The header's length, which later versions may exceed.
const LENGTH: usize = 55;

/// A version that is invalid by the standard.
const INVALID_VERSION: u64 = 0xff;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TraceParent {
    pub(crate) trace: u128,
    pub(crate) span: u64,
    pub(crate) is_sampled: bool,
}

impl TraceParent {
    /// `None` if the header is absent, invalid, or there are several.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let only = values.next()?;
        if values.next().is_some() { None } else { Self::parse(only.as_bytes()) }
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (known, rest) = text.split_at_checked(LENGTH)?;
        let version = parse_hex(&known[..2])?;
        let is_of_version =
            if version == 0 { rest.is_empty() } else { version != INVALID_VERSION && rest.first().is_none_or(|next| *next == b'-') };
        let has_fields = [2, 35, 52].iter().all(|at| known[*at] == b'-');
        let trace = u128::from(parse_hex(&known[3..19])?) << 64 | u128::from(parse_hex(&known[19..35])?);
        let parsed = Self { trace, span: parse_hex(&known[36..52])?, is_sampled: parse_hex(&known[53..])? & 1 == 1 };
        (is_of_version && has_fields && parsed.trace != 0 && parsed.span != 0).then_some(parsed)
    }

    /// Replaces a request's own header. If the trace begins here, no state of another trace goes
    /// with it.
    pub(crate) fn replace_in(self, headers: &mut Vec<Header>, begins_here: bool) {
        let is_replaced = |name: &[u8]| {
            name.eq_ignore_ascii_case(TRACEPARENT.as_str().as_bytes())
                || begins_here && name.eq_ignore_ascii_case(TRACESTATE.as_str().as_bytes())
        };
        headers.retain(|header| !is_replaced(&header.name));
        headers.push(Header { name: Bytes::from_static(b"traceparent"), value: self.to_string().into() });
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.is_sampled))
    }
}

/// Parses at most sixteen digits, lower-case only as the standard has it.
fn parse_hex(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0, |number, digit| match digit {
        b'0'..=b'9' => Some(number << 4 | u64::from(digit - b'0')),
        b'a'..=b'f' => Some(number << 4 | u64::from(digit - b'a' + 10)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parse(text: &str) -> Option<TraceParent> {
        TraceParent::parse(text.as_bytes())
    }

    #[test]
    fn a_traceparent_is_parsed_as_the_standard_says() {
        let parent = TraceParent { trace: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, span: 0x00f0_67aa_0ba9_02b7, is_sampled: true };
        assert_eq!(parse(PARENT), Some(parent));
        assert_eq!(parent.to_string(), PARENT);
        assert_eq!(parse(&PARENT.replace("-01", "-02")), Some(TraceParent { is_sampled: false, ..parent }), "another flag");
        assert_eq!(parse(&format!("cc{}-more", &PARENT[2..])), Some(parent), "of a later version");
        for wrong in [
            "",
            "00-4bf9",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn several_traceparents_count_as_none() {
        let mut headers = HeaderMap::from_iter([(TRACEPARENT, HeaderValue::from_static(PARENT))]);
        assert!(TraceParent::from_headers(&headers).is_some());
        headers.append(TRACEPARENT, HeaderValue::from_static(PARENT));
        assert_eq!(TraceParent::from_headers(&headers), None);
    }

    #[test]
    fn a_traceparent_replaces_the_clients_and_foreign_state() {
        let header = |name: &'static str, value: &'static str| Header { name: Bytes::from_static(name.as_bytes()), value: value.into() };
        let sent = vec![header("TraceParent", "x"), header("a", "b"), header("tracestate", "c=d")];
        let parent = parse(PARENT).unwrap();
        let replaced = |begins_here| {
            let mut headers = sent.clone();
            parent.replace_in(&mut headers, begins_here);
            headers
        };
        assert_eq!(replaced(false), [header("a", "b"), header("tracestate", "c=d"), header("traceparent", PARENT)]);
        assert_eq!(replaced(true), [header("a", "b"), header("traceparent", PARENT)]);
    }

    proptest! {
        #[test]
        fn any_traceparent_parses_or_is_refused(bytes: Vec<u8>, trace in 1_u128.., span in 1_u64.., is_sampled: bool) {
            TraceParent::parse(&bytes);
            let parent = TraceParent { trace, span, is_sampled };
            prop_assert_eq!(parse(&parent.to_string()), Some(parent));
        }
    }
}
