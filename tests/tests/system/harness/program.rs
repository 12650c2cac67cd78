//! The program as users run it: a separate process in a separate place, ended with all its engines
//! when the test ends.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;

use super::PROGRAM;
use super::admin::Admin;
use super::wait::{DEADLINE, until};

#[derive(Debug)]
pub(crate) struct Workplace {
    directory: TempDir,
    /// Variables of this place, such as PATH.
    pub(crate) environment: Vec<(&'static str, &'static str)>,
    program: PathBuf,
    /// User of the programs, if it is not the user who runs the test.
    user: Option<u32>,
}

#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
    name: String,
    home: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) success: bool,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Workplace {
    pub(crate) fn new() -> Self {
        // Keep the path short: the paths of Unix sockets begin with it.
        let directory = tempfile::Builder::new().prefix("h-").tempdir_in("/tmp").unwrap();
        Self { directory, environment: Vec::new(), program: PROGRAM.into(), user: None }
    }

    /// Creates another user's workplace, which only root can do.
    ///
    /// That user may not reach the files that cargo has built.
    pub(crate) fn of_user(user: u32) -> Self {
        let mut place = Self::new();
        place.program = place.path().join("hostler");
        fs::copy(PROGRAM, &place.program).unwrap();
        std::os::unix::fs::chown(place.path(), Some(user), Some(user)).unwrap();
        place.user = Some(user);
        place
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Files below the run directory, sockets included.
    pub(crate) fn left(&self) -> Vec<PathBuf> {
        fn below(path: PathBuf, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(path).into_iter().flatten().flatten() {
                found.push(entry.path());
                below(entry.path(), found);
            }
        }
        let mut found = Vec::new();
        below(self.run_dir(), &mut found);
        // The lock of the whole directory stays.
        found.retain(|path| *path != self.run_dir().join("lock"));
        found
    }

    /// Living processes that were started here, engines included.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let mark = format!("HOSTLER_AGENT_RUN_DIR={}", self.run_dir().display());
        let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let ours = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) && is_alive(*pid)
        };
        pids.filter(ours).collect()
    }

    fn run_dir(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        self.adapt(Command::new(&self.program), arguments)
    }

    fn adapt(&self, mut command: Command, arguments: &[&str]) -> Command {
        if let Some(user) = self.user {
            command.uid(user).gid(user).current_dir("/");
        }
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HOSTLER_")) {
            command.env_remove(name);
        }
        command.args(arguments).env("HOME", self.directory.path()).env_remove("XDG_CONFIG_HOME").env_remove("XDG_STATE_HOME");
        // Routers' sockets are below it, so no other router is found.
        command.env("XDG_RUNTIME_DIR", self.directory.path());
        command.env("HOSTLER_AGENT_RUN_DIR", self.run_dir()).stdin(Stdio::null());
        command.envs(self.environment.iter().copied());
        command
    }

    pub(crate) fn start(&self, name: &str, arguments: &[&str]) -> Program {
        self.start_command(name, self.command(arguments))
    }

    /// Starts the program as leader of its own session, whose id is the program's.
    pub(crate) fn start_session(&self, name: &str, arguments: &[&str]) -> Program {
        // `setsid` becomes the program, because this test's child leads no process group.
        let mut command = Command::new("setsid");
        command.arg(PROGRAM);
        self.start_command(name, self.adapt(command, arguments))
    }

    fn start_command(&self, name: &str, mut command: Command) -> Program {
        let home = self.directory.path().to_owned();
        let file = |end: &str| File::create(home.join(format!("{name}.{end}"))).unwrap();
        let child = command.stdout(file("out")).stderr(file("err")).spawn().unwrap();
        Program { child, name: name.to_owned(), home: home.clone() }
    }

    pub(crate) fn up(&self, replicas: usize, engine: &[&str]) -> Program {
        let replicas = replicas.to_string();
        let mut arguments = vec!["up", "--engine", "simulated", "--replicas", &replicas];
        arguments.extend(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--", "--sim-start-ms", "50"]);
        arguments.extend(engine);
        self.start("up", &arguments)
    }

    pub(crate) async fn run(&self, arguments: &[&str]) -> Ended {
        let mut command = tokio::process::Command::from(self.command(arguments));
        let output = tokio::time::timeout(DEADLINE, command.kill_on_drop(true).output()).await;
        let output = output.unwrap_or_else(|_| panic!("hostler {arguments:?} does not end")).unwrap();
        Ended {
            success: output.status.success(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Runs the program in a place without configuration.
pub(crate) async fn hostler(arguments: &[&str]) -> Ended {
    Workplace::new().run(arguments).await
}

impl Program {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn stdout(&self) -> String {
        fs::read_to_string(self.home.join(format!("{}.out", self.name))).unwrap_or_default()
    }

    pub(crate) fn stderr(&self) -> String {
        fs::read_to_string(self.home.join(format!("{}.err", self.name))).unwrap_or_default()
    }

    /// Waits for an output line with this prefix, and returns the whole line.
    pub(crate) async fn line(&self, beginning: &str) -> String {
        until(&format!("a line {beginning:?}"), async || {
            let (out, error) = (self.stdout(), self.stderr());
            let whole = out.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let line = whole.lines().find(|line| line.starts_with(beginning));
            line.map(str::to_owned).ok_or_else(|| format!("{out}\n{error}"))
        })
        .await
    }

    /// Address in a line such as `edge    http://127.0.0.1:8000/v1`, with TLS or without.
    pub(crate) async fn address(&self, of: &str) -> std::net::SocketAddr {
        let line = self.line(of).await;
        let address = line.split_whitespace().nth(1).unwrap().rsplit("://").next().unwrap().trim_end_matches("/v1");
        address.parse().unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// Admin of the program's router, once it has printed its socket.
    pub(crate) async fn admin(&self) -> Admin {
        let line = self.line("socket").await;
        Admin::at(Path::new(line.split_whitespace().nth(1).unwrap()))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self::signal(self.pid(), signal);
    }

    /// Waits until the program ends.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let (home, name) = (self.home.clone(), self.name.clone());
        until("the program's end", async || {
            let ended = self.child.try_wait().unwrap();
            ended.ok_or_else(|| fs::read_to_string(home.join(format!("{name}.err"))).unwrap_or_default())
        })
        .await
    }
}

impl Drop for Program {
    #[allow(clippy::disallowed_methods, reason = "a destructor cannot await, and the test is over")]
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline && self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            // The second signal stops the program at once, engines included.
            self.signal(Signal::TERM);
            std::thread::sleep(Duration::from_millis(20));
        }
        // The engines of a program that does not obey are found by its records.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for agent in fs::read_dir(self.home.join("run")).into_iter().flatten().flatten() {
            for engine in fs::read_dir(agent.path()).into_iter().flatten().flatten() {
                let record = fs::read_to_string(engine.path().join("engine.pid")).unwrap_or_default();
                if let Some(pid) = record.split_whitespace().next().and_then(|pid| pid.parse().ok()) {
                    kill_group(pid);
                }
            }
        }
    }
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    // A process that has exited is fine.
    let _ = kill_process(process(pid), signal);
}

pub(crate) fn kill_group(leader: u32) {
    signal_group(leader, Signal::KILL);
}

pub(crate) fn signal_group(leader: u32, signal: Signal) {
    let _ = kill_process_group(process(leader), signal);
}

/// Acts like a batch system: finds the processes of a session and signals each.
pub(crate) fn signal_session(leader: u32, signal: Signal) {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let members: Vec<u32> = pids.filter(|pid| session_of(*pid) == Some(leader)).collect();
    assert!(members.contains(&leader), "process {leader} leads no session");
    members.into_iter().for_each(|pid| self::signal(pid, signal));
}

pub(crate) fn session_of(pid: u32) -> Option<u32> {
    stat_fields(pid)?.get(3)?.parse().ok()
}

/// Letter of a process's state, such as `T` for stopped.
pub(crate) fn state_of(pid: u32) -> Option<char> {
    stat_fields(pid)?.first()?.chars().next()
}

/// Fields of the process's line in `/proc` after its name.
fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

/// Whether a process runs. A process that has ended and was not reaped does not.
pub(crate) fn is_alive(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

fn process(pid: u32) -> Pid {
    Pid::from_raw(pid.cast_signed()).expect("only processes that exist are signalled")
}
