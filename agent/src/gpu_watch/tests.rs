//! Incidents that a reading reveals beyond its figures.

use super::*;

fn reading(standing: GpuHealth, remap_pending: bool, remap_failed: bool) -> (GpuHealth, Vec<GpuReading>) {
    (standing, vec![GpuReading { remap_pending, remap_failed, ..GpuReading::default() }])
}

#[test]
fn lost_gpus_are_reported_at_each_reading_and_silence_once() {
    let mut before = PreviousReading::default();
    let fine = reading(GpuHealth::Reachable, false, false);
    let lost = reading(GpuHealth::Lost, false, false);
    assert_eq!(before.detect_incidents(Some(&fine)), []);
    assert_eq!(before.detect_incidents(Some(&lost)), [IncidentKind::Lost]);
    assert_eq!(before.detect_incidents(Some(&lost)), [IncidentKind::Lost]);
    assert_eq!(before.detect_incidents(None), [IncidentKind::Silent]);
    assert_eq!(before.detect_incidents(None), []);
    assert_eq!(before.detect_incidents(Some(&fine)), [IncidentKind::Answers]);
    assert_eq!(before.detect_incidents(Some(&reading(GpuHealth::NeedsReset, false, false))), [IncidentKind::NeedsReset]);
}

#[test]
fn pending_row_remaps_are_reported_once_and_failed_ones_always() {
    let mut before = PreviousReading::default();
    let pending = reading(GpuHealth::Reachable, true, false);
    assert_eq!(before.detect_incidents(Some(&pending)), [IncidentKind::RemapPending]);
    assert_eq!(before.detect_incidents(Some(&pending)), []);
    assert_eq!(before.detect_incidents(Some(&reading(GpuHealth::Reachable, false, false))), []);
    assert_eq!(before.detect_incidents(Some(&pending)), [IncidentKind::RemapPending]);
    let failed = reading(GpuHealth::Reachable, true, true);
    assert_eq!(before.detect_incidents(Some(&failed)), [IncidentKind::RemapFailed]);
    assert_eq!(before.detect_incidents(Some(&failed)), [IncidentKind::RemapFailed]);
}
