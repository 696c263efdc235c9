package docker

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	snapshots "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/namespaces"
	"github.com/docker/docker/api/types/system"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// With containerd's image store, the default of Docker Engine 29, the daemon has
// no storage of its own: images are containerd's, under the digests of their
// manifests, and a container's files are a snapshot that has the container's id.

// imageStore reports whether the daemon keeps its images in containerd.
func imageStore(info *system.Info) bool {
	return slices.ContainsFunc(info.DriverStatus, func(s [2]string) bool {
		return s[0] == "driver-type" && s[1] == "io.containerd.snapshotter.v1"
	})
}

// snapshotLayers asks the daemon's containerd for a container's directories.
func (b *Backend) snapshotLayers(
	ctx context.Context, snapshotter, id string,
) (upper string, lower []string, err error) {
	info, err := b.info(ctx, false)
	if err != nil {
		return "", nil, err
	}
	if info.Containerd == nil || info.Containerd.Address == "" {
		return "", nil, errors.New("it does not name its containerd")
	}
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+strings.TrimPrefix(info.Containerd.Address, "unix://"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", nil, err
	}
	defer conn.Close()
	got, err := snapshots.NewSnapshotsClient(conn).Mounts(
		namespaces.WithNamespace(ctx, info.Containerd.Namespaces.Containers),
		&snapshots.MountsRequest{Snapshotter: snapshotter, Key: id})
	if err != nil {
		return "", nil, fmt.Errorf("containerd: %w", err)
	}
	for _, m := range got.Mounts {
		for _, o := range m.Options {
			if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
				upper = dir
			}
			if dirs, ok := strings.CutPrefix(o, "lowerdir="); ok {
				lower = filepath.SplitList(dirs)
			}
		}
	}
	if !filepath.IsAbs(upper) {
		return "", nil, fmt.Errorf("containerd: its snapshot is no overlay: %v", got.Mounts)
	}
	return upper, lower, nil
}
