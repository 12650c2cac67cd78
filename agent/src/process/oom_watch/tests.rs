//! Location and meaning of the counters.

use super::*;

const V2_MOUNT: &str = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate";

const V1_MOUNTS: &str = "33 32 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                         34 32 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory";

fn files(cgroups: &str, mounts: &str) -> Vec<String> {
    counter_files(cgroups, mounts).into_iter().map(|file| file.to_str().unwrap().to_owned()).collect()
}

#[test]
fn a_kill_is_counted_by_the_cgroup_and_those_above() {
    assert_eq!(
        files("0::/system.slice/agent.service\n", V2_MOUNT),
        [
            "/sys/fs/cgroup/system.slice/agent.service/memory.events",
            "/sys/fs/cgroup/system.slice/memory.events",
            "/sys/fs/cgroup/memory.events"
        ]
    );
    // A container that sees only its own cgroup, and one that sees the host's paths.
    assert_eq!(files("0::/", V2_MOUNT), ["/sys/fs/cgroup/memory.events"]);
    let of_container = V2_MOUNT.replace(" / /sys", " /docker/1f /sys");
    assert_eq!(files("0::/docker/1f", &of_container), ["/sys/fs/cgroup/memory.events"]);
}

#[test]
fn the_older_cgroups_count_in_their_memory_controller() {
    let cgroups = "5:cpu,cpuacct:/\n4:memory:/slurm/job_7/step_0\n0::/\n";
    assert_eq!(files(cgroups, V1_MOUNTS), ["/sys/fs/cgroup/memory/slurm/job_7/step_0/memory.oom_control"]);
}

#[test]
fn a_cgroup_that_cannot_be_seen_has_no_counter() {
    for (cgroups, mounts) in [
        ("", V2_MOUNT),
        ("0::/../other", V2_MOUNT),
        ("0::/other", "30 24 0:26 /mine /sys/fs/cgroup rw - cgroup2 cgroup2 rw"),
        ("0::/", "1 2 0:3 / / rw - ext4 /dev/vda rw"),
        ("4:memory:/a", V2_MOUNT),
    ] {
        assert!(files(cgroups, mounts).is_empty(), "{cgroups}");
    }
}

#[test]
fn a_kill_elsewhere_counts_only_where_the_cgroup_is_silent() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory.events");
    let write = |count: u64| fs::write(&file, format!("low 0\noom 3\noom_kill {count}\noom_group_kill 0\n")).unwrap();
    write(2);
    // The host's counter has grown far since then.
    let counted = |host| OomWatch { cgroup: Some((file.clone(), 2)), host };
    assert_eq!(counted(None).has_killed(), Some(false));
    write(3);
    assert_eq!(counted(None).has_killed(), Some(true));
    fs::remove_file(&file).unwrap();
    assert_eq!(counted(None).has_killed(), None, "nobody tells, and so nobody knows");
    let host = read_count(Path::new(HOST_COUNTERS));
    assert_eq!(counted(host).has_killed(), host.map(|_| false), "a cgroup that is gone leaves it to the host");
    assert_eq!(counted(host.and_then(|count| count.checked_sub(1))).has_killed(), host.filter(|count| *count > 0).map(|_| true));
}
