//! Division of a model over nodes: the ranks that share each layer, and the stages of a pipeline,
//! which have consecutive layers each.
//!
//! Arithmetic only; `memory` computes a budget for each stage.

use super::shape::ModelShape;

/// Division of a replica over several nodes.
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
    /// Division in which `tp` ranks share each layer; `None` if that many do not divide the ranks.
    pub(super) fn new(nodes: u32, ranks_per_node: u32, tp: u32) -> Option<Self> {
        let ranks = ranks_per_node.saturating_mul(nodes);
        let stages = ranks.checked_div(tp).filter(|stages| stages * tp == ranks)?;
        Some(Self { nodes, ranks_per_node, tp, stages })
    }

    /// Whether GPUs of different nodes share layers.
    #[must_use]
    pub fn crosses_nodes_in_layers(&self) -> bool {
        self.tp > self.ranks_per_node
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineStage {
    /// Number of this stage, from 0.
    pub index: u32,
    /// Number of stages; 1 for a model that is not divided.
    pub of: u32,
    pub first_layer: u32,
    pub layers: u32,
}

impl PipelineStage {
    /// All layers in one stage.
    pub(super) fn whole(layers: u32) -> Self {
        Self { index: 0, of: 1, first_layer: 0, layers }
    }

    /// Stages as vLLM makes them (`get_pp_indices`, 0.32): layers that are left over go to the
    /// stages before the last one, which has the output head.
    pub(super) fn divide(layers: u32, of: u32) -> impl Iterator<Item = Self> {
        let (each, left) = (layers / of.max(1), layers % of.max(1));
        let mut first_layer = 0;
        (0..of).map(move |index| {
            let from_end = of - 1 - index;
            let layers = each + u32::from((1..=left).contains(&from_end));
            let stage = Self { index, of, first_layer, layers };
            first_layer += layers;
            stage
        })
    }

    /// Whether this stage has the token embeddings.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.index == 0
    }

    /// Whether this stage has the output head.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.index + 1 >= self.of
    }

    /// Layers of this stage among the first `count` of the model.
    pub(super) fn layers_among_first(&self, count: u32) -> u32 {
        count.saturating_sub(self.first_layer).min(self.layers)
    }

    /// Shape of the layers of this stage. Kinds of layers are shared in proportion and rounded up:
    /// most models alternate them in short periods.
    pub(super) fn shape(&self, model: &ModelShape) -> ModelShape {
        if self.of <= 1 {
            return model.clone();
        }
        let part = |number: u32| {
            let part = (u64::from(number) * u64::from(self.layers)).div_ceil(u64::from(model.layers.max(1)));
            u32::try_from(part).unwrap_or(u32::MAX)
        };
        ModelShape {
            layers: self.layers,
            full_layers: part(model.full_layers),
            windowed_layers: part(model.windowed_layers),
            recurrent_layers: part(model.recurrent_layers),
            ..model.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_divided_as_vllm_does() {
        let layers = |layers, of| PipelineStage::divide(layers, of).map(|stage| stage.layers).collect::<Vec<_>>();
        assert_eq!(layers(126, 2), [63, 63]);
        assert_eq!(layers(126, 4), [31, 32, 32, 31]);
        assert_eq!(layers(61, 2), [31, 30]);
        assert_eq!(layers(61, 3), [20, 21, 20]);
        assert_eq!(layers(7, 4), [2, 2, 2, 1]);
    }

    #[test]
    fn stages_have_each_layer_once_and_one_end_each() {
        for (layers, of) in [(61, 1), (61, 2), (61, 7), (126, 16), (80, 80)] {
            let stages: Vec<PipelineStage> = PipelineStage::divide(layers, of).collect();
            assert_eq!(stages.iter().map(|stage| stage.layers).sum::<u32>(), layers);
            assert!(stages.windows(2).all(|pair| pair[0].first_layer + pair[0].layers == pair[1].first_layer));
            assert_eq!(stages.iter().filter(|stage| stage.is_first()).count(), 1);
            assert_eq!(stages.iter().filter(|stage| stage.is_last()).count(), 1);
            assert_eq!(stages.iter().map(|stage| stage.layers_among_first(3)).sum::<u32>(), 3);
        }
    }
}
