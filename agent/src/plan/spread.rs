//! Division of a replica over several nodes: what is shared by the GPUs of a node, and what by the
//! nodes.
//!
//! Tensor parallelism exchanges data in every layer, so by default it stays within a node, where
//! NVLink joins the GPUs. The nodes are stages of a pipeline: each passes its result on once a step.

use super::error::PlanError;
use crate::config::AgentConfig;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaSpread {
    pub nodes: u32,
    /// Processes of each node that compute: one for each GPU, or one on the CPU.
    pub ranks_per_node: u32,
    /// Ranks that share each layer.
    pub tp: u32,
    /// Stages of the pipeline.
    pub stages: u32,
}

impl ReplicaSpread {
    /// Division over the nodes of these settings, each with this many GPUs; `None` if a replica has
    /// one node.
    ///
    /// # Errors
    /// When `--tp` does not divide the ranks into stages that lie evenly on the nodes.
    pub(super) fn of(config: &AgentConfig, gpus: usize) -> Result<Option<Self>, PlanError> {
        let nodes = config.nodes_per_replica;
        if nodes <= 1 {
            return Ok(None);
        }
        let ranks_per_node = u32::try_from(gpus).unwrap_or(u32::MAX).max(1);
        let ranks = ranks_per_node.saturating_mul(nodes);
        let tp = if config.tp == 0 { ranks_per_node } else { config.tp };
        if !ranks.is_multiple_of(tp) {
            return Err(PlanError::DoesNotSpread { tp, ranks, nodes });
        }
        Ok(Some(Self { nodes, ranks_per_node, tp, stages: ranks / tp }))
    }

    /// Whether GPUs of different nodes share layers.
    #[must_use]
    pub fn crosses_nodes_in_layers(&self) -> bool {
        self.tp > self.ranks_per_node
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(nodes: u32, tp: u32, gpus: usize) -> Result<Option<ReplicaSpread>, PlanError> {
        ReplicaSpread::of(&AgentConfig { nodes_per_replica: nodes, tp, ..AgentConfig::default() }, gpus)
    }

    #[test]
    fn layers_are_shared_within_a_node_and_stages_lie_on_the_nodes() {
        let division = |nodes, tp, gpus| spread(nodes, tp, gpus).unwrap().map(|found| (found.tp, found.stages));
        assert_eq!(division(1, 0, 4), None);
        assert_eq!(division(2, 0, 4), Some((4, 2)));
        assert_eq!(division(2, 2, 4), Some((2, 4)), "two stages on each node");
        assert_eq!(division(2, 8, 4), Some((8, 1)), "layers are shared over the network on request");
        assert_eq!(division(3, 0, 0), Some((1, 3)), "a CPU is one rank");
    }

    #[test]
    fn ranks_that_do_not_divide_are_refused() {
        let refused = spread(2, 3, 4).unwrap_err().to_string();
        assert!(refused.contains("--tp 3") && refused.contains("8"), "{refused}");
    }
}
