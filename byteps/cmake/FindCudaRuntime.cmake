# Makes the target CudaRuntime, if the CUDA run-time library is anywhere: in a toolkit, else in the
# wheels that a CUDA build of torch brings, together with nvidia-cuda-crt. Nothing here needs nvcc:
# the engine only copies.
find_package(CUDAToolkit QUIET)
if(CUDAToolkit_FOUND)
  set(cuda_include_hints ${CUDAToolkit_INCLUDE_DIRS})
  set(cuda_library_hints ${CUDAToolkit_LIBRARY_DIR})
else()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE site_packages OUTPUT_STRIP_TRAILING_WHITESPACE)
  file(GLOB cuda_include_hints "${site_packages}/nvidia/*/include")
  file(GLOB cuda_library_hints "${site_packages}/nvidia/*/lib")
endif()
find_path(CUDA_RUNTIME_INCLUDE_DIR cuda_runtime_api.h HINTS ${cuda_include_hints} NO_DEFAULT_PATH)
# Static, so that the module needs no run-time library of its own version beside torch's.
find_library(CUDA_RUNTIME_LIBRARY libcudart_static.a HINTS ${cuda_library_hints} NO_DEFAULT_PATH)
if(CUDA_RUNTIME_LIBRARY AND EXISTS "${CUDA_RUNTIME_INCLUDE_DIR}/crt/host_defines.h")
  add_library(CudaRuntime INTERFACE)
  target_include_directories(CudaRuntime SYSTEM INTERFACE ${CUDA_RUNTIME_INCLUDE_DIR})
  target_link_libraries(CudaRuntime INTERFACE ${CUDA_RUNTIME_LIBRARY} Threads::Threads
                                              ${CMAKE_DL_LIBS} rt)
endif()
