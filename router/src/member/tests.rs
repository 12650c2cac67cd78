//! Tests which name a certificate's holder may attach by, and for how long.

use hostler_tls::{Authority, NodeKey};
use tonic::Code;

use super::*;

fn certified(node: &str, issued: u64, until: u64) -> CertificateInfo {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create(&folder.path().join("ca"), "f").unwrap();
    let request = NodeKey::load_or_create(&folder.path().join("key")).unwrap().request().unwrap();
    let read = authority.issue(node, "0011223344556677", &request, Duration::from_secs(3600)).unwrap().info;
    CertificateInfo { issued_at: issued, expires_at: until, ..read }
}

fn member(certified: &CertificateInfo, fence: &Arc<NewestCertificates>) -> Arc<Member> {
    Arc::new(Member::new(certified.clone(), fence.clone()))
}

#[test]
fn a_node_attaches_only_under_its_certificates_name() {
    let now = hostler_tls::now();
    let member = member(&certified("n1", now, now + 60), &Arc::default());
    let refused = member.attach("n2").unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("calls itself node `n2`") && refused.message().contains("node `n1`'s"), "{refused}");
    assert!(!member.is_attached());
    let attached = member.attach("n1").unwrap();
    assert!(member.is_attached());
    drop(attached);
    assert!(!member.is_attached());
}

#[test]
fn a_certificate_is_refused_after_a_much_newer_one() {
    let (now, fence) = (hostler_tls::now(), Arc::<NewestCertificates>::default());
    let old = certified("n1", now - 1000, now + 60);
    drop(member(&old, &fence).attach("n1").unwrap());
    // The certificate is from another router whose clock is a little behind.
    fence.record_issued(&CertificateInfo { issued_at: now - 1000 + BACKDATE_SECONDS, ..old.clone() });
    drop(member(&old, &fence).attach("n1").unwrap());
    fence.record_issued(&CertificateInfo { issued_at: now, ..old.clone() });
    let refused = member(&old, &fence).attach("n1").unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert!(refused.message().contains("newer certificate"), "{refused}");
    drop(member(&CertificateInfo { node: "n2".into(), ..old }, &fence).attach("n2").unwrap());
}

#[tokio::test]
async fn an_attachment_lasts_as_long_as_its_newest_certificate() {
    let good = certified("n1", hostler_tls::now(), hostler_tls::now() + 3600);
    let until = |expires_at: u64| member(&CertificateInfo { expires_at, ..good.clone() }, &Arc::default());
    let attached = until(good.expires_at).attach("n1").unwrap();
    let ended = tokio::time::timeout(Duration::from_millis(50), attached.wait_expired()).await;
    assert!(ended.is_err(), "it holds for an hour: {ended:?}");
    assert_eq!(until(hostler_tls::now()).attach("n1").unwrap_err().code(), Code::Unauthenticated);

    let ending = until(hostler_tls::now() + 2);
    let attached = ending.attach("n1").unwrap();
    ending.record_renewal(0);
    let ended = tokio::time::timeout(Duration::from_secs(10), attached.wait_expired()).await;
    assert_eq!(ended.unwrap().code(), Code::Unauthenticated, "an older certificate takes nothing away, and adds nothing");

    let renewed = until(hostler_tls::now() + 2);
    let attached = renewed.attach("n1").unwrap();
    renewed.record_renewal(good.expires_at);
    let ended = tokio::time::timeout(Duration::from_millis(2500), attached.wait_expired()).await;
    assert!(ended.is_err(), "it goes on with the newer one: {ended:?}");
}
