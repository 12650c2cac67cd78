//! Reflection, version 1 and the older one that most tools still use. Clients learn the contract
//! from the router itself.

use std::sync::LazyLock;

use hostler_proto::inference::v1::DESCRIPTORS;
use tonic::service::Routes;
use tonic_reflection::pb;
use tonic_reflection::server::Builder;

/// Both versions. Unknown paths are answered as unimplemented.
pub(super) static REFLECTION: LazyLock<Routes> = LazyLock::new(|| {
    let services = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(pb::v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(pb::v1alpha::FILE_DESCRIPTOR_SET)
            .include_reflection_service(false)
    };
    let why = "the descriptors were made with this program";
    Routes::new(services().build_v1().expect(why)).add_service(services().build_v1alpha().expect(why)).prepare()
});
