//! Responses of an engine to incidents of its GPU.

use super::*;

fn outcome(what: IncidentKind, on_slice: bool) -> IncidentResponse {
    respond(&GpuIncident { whole_uuid: "GPU-aa".to_owned(), index: 2, kind: what }, on_slice)
}

#[test]
fn gpu_faults_restart_or_quarantine_engines_or_are_only_logged() {
    let logged = [13, 31, 43, 45, 63, 92, 154, 4711];
    for xid in logged {
        assert!(
            matches!(outcome(IncidentKind::Xid(xid), false), IncidentResponse::Log(reason) if reason.contains(&format!("XID {xid} on GPU 2"))),
            "{xid}"
        );
    }
    for xid in [32, 94] {
        assert!(matches!(outcome(IncidentKind::Xid(xid), false), IncidentResponse::Fail(reason) if reason.contains("restarted")), "{xid}");
    }
    for (xid, expected) in
        [(64, false), (74, false), (46, true), (48, true), (62, true), (79, true), (95, true), (119, true), (120, true), (140, true)]
    {
        let IncidentResponse::Quarantine { reason, at_once } = outcome(IncidentKind::Xid(xid), false) else { panic!("{xid}") };
        assert_eq!(at_once, expected, "{xid}");
        assert!(reason.contains(&format!("XID {xid}")) && reason.ends_with("reboot the node"), "{reason}");
    }
}

#[test]
fn a_fault_of_one_slice_spares_engines_on_the_others() {
    assert!(matches!(outcome(IncidentKind::Xid(94), true), IncidentResponse::Log(_)));
    assert!(
        matches!(outcome(IncidentKind::Xid(79), true), IncidentResponse::Quarantine { at_once: true, .. }),
        "that concerns all of them"
    );
}

#[test]
fn bad_gpu_readings_quarantine_with_a_remedy() {
    assert!(
        matches!(outcome(IncidentKind::Lost, false), IncidentResponse::Quarantine { at_once: true, reason } if reason.contains("reboot the node"))
    );
    assert!(
        matches!(outcome(IncidentKind::NeedsReset, false), IncidentResponse::Quarantine { at_once: true, reason } if reason.contains("reset it"))
    );
    assert!(
        matches!(outcome(IncidentKind::RemapFailed, false), IncidentResponse::Quarantine { at_once: false, reason } if reason.contains("replaced"))
    );
    for what in [IncidentKind::RemapPending, IncidentKind::Silent, IncidentKind::Answers] {
        assert!(matches!(outcome(what, false), IncidentResponse::Log(_)), "{what:?}");
    }
}
