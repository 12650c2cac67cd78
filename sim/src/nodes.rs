//! A simulated engine over several nodes, as vLLM divides one without Ray: the head computes each
//! step together with the workers of the other nodes.
//!
//! It behaves as two H100s under NCCL were seen to (vLLM 0.33). A head whose worker is gone or
//! stopped gives no token and no error, and its health stays good. A worker whose head is gone
//! stays, and cannot join another head.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tracing::{error, info};

use crate::args::EngineArgs;
use crate::error::Error;

/// How often a worker tries to reach its head.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The workers on other nodes.
#[derive(Debug, Default)]
pub(crate) struct FarWorkers(Vec<TcpStream>);

impl FarWorkers {
    /// Waits for the workers of all other nodes, on the port that `--master-port` names.
    ///
    /// Like PyTorch's store, it listens on all interfaces.
    pub(crate) async fn gather(args: &EngineArgs) -> Result<Self, Error> {
        let expected = args.nnodes.saturating_sub(1) as usize;
        let mut workers = Self::default();
        if expected == 0 {
            return Ok(workers);
        }
        let address = format!("0.0.0.0:{}", args.master_port);
        let bind = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::AddrInUse => Error::AddressInUse { address: address.clone() },
            _ => Error::Bind { address: address.clone(), source },
        };
        let store = TcpListener::bind((Ipv4Addr::UNSPECIFIED, args.master_port)).await.map_err(bind)?;
        while workers.0.len() < expected {
            if let Ok((mut worker, _)) = store.accept().await {
                // Whoever connects says its rank first.
                if worker.read_u32().await.is_ok() && worker.set_nodelay(true).is_ok() {
                    workers.0.push(worker);
                }
            }
        }
        info!("world_size={} is complete", args.nnodes);
        Ok(workers)
    }

    /// Computes a step together with all workers. Never returns once one of them is gone.
    pub(crate) async fn step(&mut self) {
        for worker in &mut self.0 {
            if worker.write_u8(0).await.is_err() || worker.read_u8().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Runs the part of an engine that `--headless` names, until it is killed.
pub(crate) async fn run_headless(args: &EngineArgs) -> Result<(), Error> {
    info!("Launching vLLM (v{}) headless multiproc executor, node_rank={}", crate::VLLM_VERSION, args.node_rank);
    let life = work(args);
    match args.sim_die_after_ms {
        // All crashes that vLLM notices by itself end with exit code 0.
        Some(after) => drop(tokio::time::timeout(Duration::from_millis(after), life).await),
        None => life.await,
    }
    Ok(())
}

async fn work(args: &EngineArgs) {
    let address = (args.master_addr.as_str(), args.master_port);
    let mut head = loop {
        match TcpStream::connect(address).await {
            Ok(head) => break head,
            Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    };
    let joined = head.write_u32(args.node_rank).await;
    info!("worker of node {} has joined {}:{}", args.node_rank, args.master_addr, args.master_port);
    if joined.is_ok() && head.set_nodelay(true).is_ok() {
        while let Ok(step) = head.read_u8().await {
            if head.write_u8(step).await.is_err() {
                break;
            }
        }
    }
    error!("RuntimeError: Connection closed by peer [{}]:{}", args.master_addr, args.master_port);
    std::future::pending::<()>().await;
}
