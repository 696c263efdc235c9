package main

import (
	"context"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/runtime"
)

func (f *fakeService) PullImage(_ context.Context, ref string, opts image.PullOptions) (runtime.Image, error) {
	return runtime.Image{Name: ref, Digest: "sha256:pulled"},
		f.call("PullImage", ref, opts.Policy, opts.Source.Platform, opts.Source.Insecure, opts.Source.MaxBytes)
}

func (f *fakeService) PushImage(
	_ context.Context, ref, to string, opts image.SourceOptions,
) (runtime.PushedImage, error) {
	return runtime.PushedImage{Reference: to, Digest: "sha256:pushed"}, f.call("PushImage", ref, to, opts.Insecure)
}

func (f *fakeService) InspectImage(_ context.Context, ref string) (runtime.ImageDetails, error) {
	return runtime.ImageDetails{
		Image: runtime.Image{Name: ref}, History: []image.History{
			{CreatedBy: "first", Bytes: 1000}, {CreatedBy: "second", Empty: true},
		},
	}, f.call("InspectImage", ref)
}

func (f *fakeService) TagImage(_ context.Context, ref, name string) error {
	return f.call("TagImage", ref, name)
}

func (f *fakeService) PruneImages(_ context.Context, all bool) (runtime.PrunedImages, error) {
	return runtime.PrunedImages{Removed: []runtime.Image{{Digest: "sha256:gone"}}, Freed: 2000},
		f.call("PruneImages", all)
}

func (f *fakeService) VerifyImage(_ context.Context, ref string) (runtime.Image, error) {
	return runtime.Image{Name: ref}, f.call("VerifyImage", ref)
}

func (f *fakeService) Commit(_ context.Context, ref, to string, opts runtime.CommitOptions) (runtime.Committed, error) {
	return runtime.Committed{Reference: to, Digest: "sha256:made", Notes: []string{"a socket"}},
		f.call("Commit", ref, to, opts.Author, opts.Message, opts.Changes, opts.Created.Unix())
}
