// Package testpb is the service that the tests of resiliencegrpc call.
package testpb

// protoc-gen-go v1.36.12 and protoc-gen-go-grpc v1.6.2 made the .pb.go files:
//go:generate protoc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative test.proto
