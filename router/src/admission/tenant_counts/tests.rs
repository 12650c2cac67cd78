use super::super::UsageEstimate;
use super::*;
use crate::keys::KeyLimits;

fn caller(key: &str, tenant: &str) -> Caller {
    let limits = KeyLimits { in_flight: Some(2), ..KeyLimits::default() };
    Caller { key: key.into(), limits: Arc::new(limits), ..Caller::anonymous(tenant.into()) }
}

fn estimate(prompt_tokens: u64) -> UsageEstimate {
    UsageEstimate { prompt_tokens, output_tokens: 50, ..UsageEstimate::default() }
}

/// Name, admitted, in flight, prompt tokens, generated tokens and refused.
fn counted(admission: &Admission) -> Vec<(String, [u64; 5])> {
    let figures = |counts: &TenantCounts| {
        let refused = counts.refused().map(|(_, count)| count).sum();
        [counts.admitted(), counts.in_flight(), counts.prompt_tokens(), counts.generation_tokens(), refused]
    };
    admission.tenant_counts().iter().map(|(name, counts)| (name.to_string(), figures(counts))).collect()
}

fn used(prompt_tokens: Option<u64>, output_tokens: OutputTokens) -> ActualUsage {
    ActualUsage { prompt_tokens, output_tokens }
}

#[tokio::test(start_paused = true)]
async fn keys_of_a_tenant_are_counted_together() {
    let admission = Admission::new(10);
    let admit = |key, tenant| admission.admit(&caller(key, tenant), estimate(7)).unwrap();
    let _permits = (admit("k1", "team"), admit("k2", "team"), admit("k3", ""), admission.admit(&Caller::anonymous("".into()), estimate(7)));
    assert_eq!(counted(&admission), [("k3".to_owned(), [1, 1, 0, 0, 0]), ("team".to_owned(), [2, 2, 0, 0, 0])]);
}

#[tokio::test(start_paused = true)]
async fn tokens_are_counted_when_a_request_has_ended() {
    let admission = Admission::new(10);
    let admit = || admission.admit(&caller("k", ""), estimate(7)).unwrap();
    let mut reported = admit();
    reported.reconcile_usage(used(Some(9), OutputTokens::Exact(20)));
    assert_eq!(counted(&admission)[0].1, [1, 1, 0, 0, 0]);
    drop(reported);
    assert_eq!(counted(&admission)[0].1, [1, 0, 9, 20, 0]);
    let mut seen = admit();
    seen.reconcile_usage(used(None, OutputTokens::AtLeast(3)));
    drop(seen);
    assert_eq!(counted(&admission)[0].1, [2, 0, 16, 23, 0]);
    let mut refused_by_its_engine = admit();
    refused_by_its_engine.reconcile_usage(used(Some(0), OutputTokens::Exact(0)));
    refused_by_its_engine.reconcile_usage(used(None, OutputTokens::AtLeast(0)));
    drop(refused_by_its_engine);
    drop(admit());
    assert_eq!(counted(&admission)[0].1, [4, 0, 16, 23, 0], "nothing was computed for these");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_counted_by_the_limit_that_it_hit() {
    let admission = Admission::new(10);
    let admit = || admission.admit(&caller("k", "team"), estimate(7));
    let _permits = (admit().unwrap(), admit().unwrap());
    assert_eq!(admit().unwrap_err().limit, LimitKind::InFlight);
    let (_, counts) = admission.tenant_counts().remove(0);
    let hit: Vec<_> = counts.refused().filter(|(_, count)| *count > 0).collect();
    assert_eq!((hit, counts.admitted(), counts.in_flight()), (vec![("in_flight", 1)], 2, 2));
}

#[tokio::test(start_paused = true)]
async fn tenants_beyond_the_bound_are_counted_as_one() {
    let admission = Admission::new(10);
    for number in 0..MAX_TENANTS + 3 {
        admission.admit(&caller("k", &format!("t{number:03}")), estimate(7)).unwrap();
    }
    let counts = counted(&admission);
    assert_eq!(counts.len(), MAX_TENANTS + 1);
    assert_eq!((counts[0].0.as_str(), counts[0].1[0]), (OTHERS, 3));
}
