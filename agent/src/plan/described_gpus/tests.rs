//! Parsing of GPU descriptions.

use super::*;

#[test]
fn gpus_are_described_by_number_and_size() {
    let described = parse_gpus("2x80, 1x24GB", 0).unwrap();
    let shown: Vec<(u32, &str, u64)> = described.gpus.iter().map(|gpu| (gpu.index, gpu.uuid.as_str(), gpu.memory_bytes >> 30)).collect();
    assert_eq!(shown, [(0, "GPU-0", 80), (1, "GPU-1", 80), (2, "GPU-2", 24)]);
    assert!(!described.links.is_one_domain(&described.gpus[..2]));
    assert!(parse_gpus("1x140.4GiB", 0).unwrap().gpus[0].memory_bytes > 140 << 30);
}

#[test]
fn nvlink_joins_gpus_of_one_kind_in_groups() {
    let described = parse_gpus("4x80,2x24", 2).unwrap();
    let one = |range: std::ops::Range<usize>| described.links.is_one_domain(&described.gpus[range]);
    assert!(one(0..2) && one(2..4) && one(4..6));
    assert!(!one(1..3) && !one(3..5));
}

#[test]
fn slices_are_named_as_nvidia_names_them() {
    let described = parse_gpus("7x1g.10gb", 8).unwrap();
    let first = &described.gpus[0];
    assert_eq!((first.slice.is_some(), first.name.as_str(), first.memory_bytes), (true, "MIG 1g.10gb", 10_200_547_328));
    assert!(!described.links.is_one_domain(&described.gpus[..2]));
}

#[test]
fn an_invalid_gpu_description_is_refused_with_the_format() {
    for text in ["", "80", "x80", "4x", "4xH100", "0x80", "100x80", "4x80,", "4x-1", "2xg.40gb", "2xag.40gb", "1x0", "1xNaN"] {
        let error = parse_gpus(text, 0).unwrap_err().to_string();
        assert!(error.contains("4x80"), "{text}: {error}");
    }
}
