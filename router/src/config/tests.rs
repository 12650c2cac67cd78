//! Settings that no user changes.

use super::*;

#[test]
fn settings_reserved_for_tests_are_read_as_constants() {
    let read: RouterConfig = serde_json::from_str("{}").unwrap();
    assert_eq!((read.certificate_lifetime, read.client_stall_timeout), (CERTIFICATE_LIFETIME, CLIENT_STALL_TIMEOUT));
    let refused = serde_json::from_str::<RouterConfig>(r#"{"client_stall_timeout": "1s"}"#).unwrap_err().to_string();
    assert!(refused.contains("unknown field `client_stall_timeout`"), "{refused}");
}
