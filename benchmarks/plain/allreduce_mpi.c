/* An allreduce of MPI, timed as `hvdkit bench` times Horovod's: BYTES…
   Rank 0 prints the median time in microseconds of each size, JSON. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int i = 1; i < argc; ++i) {
    int count = atoi(argv[i]) / 4;
    int repeats = (int)(1000000000.0 / (4.0 * count) / 8);
    repeats = repeats < 8 ? 8 : repeats > 400 ? 400 : repeats;
    float *data = malloc(4 * (size_t)count);
    double *seconds = malloc(sizeof(double) * repeats);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (int j = 0; j < count; ++j) data[j] = (float)(rank + 1);
      MPI_Barrier(MPI_COMM_WORLD);
      double began = MPI_Wtime();
      MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      seconds[repeat] = MPI_Wtime() - began;
      if (data[count - 1] != size * (size + 1) / 2) MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Allreduce(MPI_IN_PLACE, seconds, repeats, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(seconds, repeats, sizeof(double), by_size);
    if (rank == 0)
      printf("%s\"%d\": %.3f%s", i == 1 ? "{" : ", ", 4 * count, 1e6 * seconds[repeats / 2], i + 1 == argc ? "}\n" : "");
    free(data);
    free(seconds);
  }
  MPI_Finalize();
  return 0;
}
