package resiliencegrpc

import (
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// Idempotent reports whether a full method, such as "/users.v1.Users/Get", is declared to
// be without side effects or idempotent:
//
//	rpc Get(GetRequest) returns (User) { option idempotency_level = NO_SIDE_EFFECTS; }
//
// It reads the descriptors that generated code registers (protoregistry.GlobalFiles). A
// method that is not registered is not idempotent.
func Idempotent(method string) bool {
	name := strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", ".")
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	if err != nil {
		return false
	}
	descriptor, ok := found.(protoreflect.MethodDescriptor)
	if !ok {
		return false
	}
	options, _ := descriptor.Options().(*descriptorpb.MethodOptions)
	return options.GetIdempotencyLevel() != descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
}
