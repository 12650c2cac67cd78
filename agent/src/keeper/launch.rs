//! Creation of the engine by its keeper: on its CPUs, in its own process group, with its output in
//! a pipe.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use tokio::net::unix::pipe;

use super::ALLOCATOR_SETTING;
use super::wire::ProcessSpec;
use crate::process::KEEPER_OF;
use crate::process::record::ProcessRecord;

/// Restricts a thread, and everything it starts, to these CPUs; `None` is this one.
///
/// Memory then comes from the nearest node by itself, because Linux allocates it where it is first
/// touched. A memory policy cannot be set safely, and is not needed.
pub(super) fn bind_to_cpus(thread: Option<Pid>, cpus: &[u32]) -> io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    for cpu in cpus.iter().map(|cpu| *cpu as usize).filter(|cpu| *cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    Ok(sched_setaffinity(thread, &set)?)
}

/// Creates a process through `exec`, in its own group and in the keeper's session.
///
/// Returns its record, and what it prints. In a container, it gets a guard beside it.
pub(super) fn spawn(spec: &ProcessSpec, input: Stdio) -> io::Result<(ProcessRecord, pipe::Receiver)> {
    let (reader, writer) = io::pipe()?;
    let mut command = Command::new(&spec.keeper);
    command.args([OsStr::new("keeper"), OsStr::new("exec"), OsStr::new(&std::process::id().to_string())]);
    command.arg(&spec.directory).args(&spec.container).arg(&spec.program).args(&spec.arguments);
    for name in &spec.unset {
        command.env_remove(name);
    }
    command.env_remove(KEEPER_OF).env_remove(ALLOCATOR_SETTING.0).envs(spec.set.iter().map(|(name, value)| (name, value)));
    // Spawning also resets signals to their defaults, except those that the agent was started to
    // ignore.
    let child = command.process_group(0).stdin(input).stdout(writer.try_clone()?).stderr(writer).spawn()?;
    if !spec.container.is_empty() {
        spawn_guard(&spec.keeper)?;
    }
    // The command holds this process's copies of the writing end. Once they are gone, the pipe ends
    // with the process.
    drop(command);
    // The child is not yet reaped, so its record exists even if it has ended.
    let record = ProcessRecord::of(child.id().cast_signed())?;
    Ok((record, pipe::Receiver::from_owned_fd(reader.into())?))
}

/// Creates the process that ends what runs in this session once this process is gone, however that
/// came.
///
/// The kernel cannot see to it as it does without a container: it forgets to end a process with its
/// parent when a thread of that process starts another program, as the runtime's command in Go
/// does.
fn spawn_guard(keeper: &OsStr) -> io::Result<()> {
    let (reader, writer) = io::pipe()?;
    Command::new(keeper).args(["keeper", "guard"]).process_group(0).stdin(reader).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    // It stays open for as long as this process lives, and no other has it.
    std::mem::forget(writer);
    Ok(())
}

pub(super) fn describe_start_error(program: &OsStr, error: &io::Error) -> String {
    format!("cannot start {}: {error}", program.display())
}
