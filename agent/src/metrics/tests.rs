use super::*;

#[derive(Debug)]
struct ListedGpus(Vec<(Vec<String>, GpuState)>);

impl Collector for ListedGpus {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode_gpus(&mut encoder, &self.0)
    }
}

#[test]
fn metric_families_are_described_once_and_counters_end_in_total() {
    let mut page = MetricRegistry::default();
    AgentMetrics::register(&mut page);
    let mut names: Vec<&str> = page.descriptions().iter().map(|described| described.name.as_str()).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    for described in page.descriptions() {
        assert_eq!(described.kind.as_str() == "counter", described.name.ends_with("_total"), "{}", described.name);
        assert!(described.help.ends_with('.'), "{}", described.name);
    }
}

#[test]
fn a_gpu_shows_only_the_figures_of_its_driver() {
    let reading = GpuReading {
        memory_used_bytes: Some(1_000),
        utilisation: Some(87),
        watts: Some(612.5),
        throttled: vec!["temperature", "power limit"],
        last_xid: 13,
        ..GpuReading::default()
    };
    let gpu = Gpu { index: 3, memory_bytes: 4_000, ..Gpu::default() };
    let labels = ["0", "3", "GPU-1"].map(str::to_owned).to_vec();
    let mut page = MetricRegistry::default();
    page.register_collector(ListedGpus(vec![(labels, (gpu, reading))]));
    let page = page.render();
    let samples: Vec<&str> = page.lines().filter(|line| !line.starts_with('#')).collect();
    insta::assert_snapshot!(samples.join("\n"), @r#"
    hostler_agent_gpu_memory_bytes{replica="0",gpu="3",uuid="GPU-1"} 4000
    hostler_agent_gpu_memory_used_bytes{replica="0",gpu="3",uuid="GPU-1"} 1000
    hostler_agent_gpu_utilisation{replica="0",gpu="3",uuid="GPU-1"} 0.87
    hostler_agent_gpu_watts{replica="0",gpu="3",uuid="GPU-1"} 612.5
    hostler_agent_gpu_remap_pending{replica="0",gpu="3",uuid="GPU-1"} 0
    hostler_agent_gpu_remap_failed{replica="0",gpu="3",uuid="GPU-1"} 0
    hostler_agent_gpu_last_xid{replica="0",gpu="3",uuid="GPU-1"} 13
    hostler_agent_gpu_throttled{replica="0",gpu="3",uuid="GPU-1",reason="temperature"} 1
    hostler_agent_gpu_throttled{replica="0",gpu="3",uuid="GPU-1",reason="power limit"} 1
    "#);
    let families = page.lines().filter(|line| line.starts_with("# TYPE ")).count();
    assert_eq!(families, GPUS.figures.len() + 1, "a family is there even while nothing is told");
}
